"""An EAGLE or P-EAGLE head drafts, level by level, a chain or a tree.

::

    position          0     1     2     3    4 = length          row p is computed from token p and the feature of p - 1
    features         f0    f1    f2    f3                        the target's own, fused; stored when they are committed
    head's KV     nothing   r1    r2    r3 | r4  drafted         r4 is the root's; drafted rows are scratch

All state of a text is in its pages: the fused features in one store, the head's keys and values in another. So there is
no per-sequence state. A step accepts between 1 and K + 1 tokens of a tree of K levels. The first pass need not know how
many: it runs the last K + 1 rows of the text with their true features, whichever of them are new::

    position      length - K .. length - 1   length    ..
    begin         row           row          root          drafting continues from the root's state
    levels                                        node     a pass for each further level, over its expanded nodes, with
                                                           the states of their parents

A row that was valid already is rewritten with the same values, so this is allowed even in a shared page. Drafted rows
are never kept.

A P-EAGLE head runs EAGLE's rows, and after the root a mask for each further level, in one pass::

    position   length - K .. length - 1   length    length + 1   length + 2
    rows       true features              root      mask         mask           scratch, from the root on
    guesses                               x(l + 1)  x(l + 2)     x(l + 3)

No level depends on the one before, so all nodes of a depth have the same candidates below them, as with DFlash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from foresay.drafters.growth import Growth, below
from foresay.drafters.hidden_states import FeatureDrafter, feature_store, marginal_logits
from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.names import EAGLE, EAGLE3, PEAGLE
from foresay.spec.protocols import Features, Rows
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.capture import Replay, recorded
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import StepState, sent
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.config import kv_shapes
from foresay.verifier.ops.eager import compiled

log = logging.getLogger("foresay.drafters")

#: Committed text is caught up in chunks of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256
#: Up to so many rows, the usual after a step with other drafts, are caught up in a recorded pass.
_FEW_ROWS = 8


class EagleDrafter(FeatureDrafter):
    """Drafts with a head. Owns the store of its keys and values. kv: their dtype; None: as computed. vocabulary: the
    tokens that it drafts, if not all."""

    first = 1

    def __init__(
        self,
        head: EagleHead,
        pool: PagePool,
        name: str = "",
        kv: torch.dtype | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        layer, device = head.layer, head.device
        name = name or (PEAGLE if head.mask is not None else EAGLE3 if head.config.generation == 3 else EAGLE)
        features = feature_store(pool, layer.hidden_size, head.dtype, device)
        super().__init__(name, head.config.needs, features, head.token_ids)
        self.store = KVStore(pool, kv_shapes(layer), kv or head.dtype, device)
        self.head, self.vocabulary, self.deepest = head, vocabulary, head.config.guesses or None
        self._cut = head if vocabulary is None else head.with_vocabulary(vocabulary)
        self._warned = False
        self._masks: dict[tuple[int, int], tuple[Nodes, Tensor]] = {}  # of a head that has them

    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the target's layers, fused to the head's input."""
        return self.head.fuse(features)

    @property
    def trained_positions(self) -> int:
        """The longest text the head was trained for, by its configuration."""
        return self.head.layer.max_positions

    def _mark(self, table: PageTable, start: int, stop: int) -> None:
        """Also warn once if a text is longer than any the head was trained on."""
        super()._mark(table, start, stop)
        if stop > self.trained_positions and not self._warned:
            self._warned = True
            log.warning(
                "a text has passed %d tokens, the longest the %s head was trained on: it may guess worse from here on",
                self.trained_positions,
                self.name,
            )

    def extend(self, sequence: SequenceState) -> None:
        """Run committed rows that were not run yet, at most ``_CATCH_UP_ROWS`` of them."""
        table = sequence.table
        if self.knows(sequence) and table.length:
            start = self._start(sequence)
            stop = min(table.length, start + _CATCH_UP_ROWS)
            if stop > start:
                tokens = torch.tensor(sequence.tokens[start:stop])
                hidden = self.rows[sent(table.slots(start - 1, stop - 1), self.device)]
                self.head.run([Rows(table, tokens, start, logits="none")], hidden, self.store)
            self.store.mark(table, stop)

    def reach(self, levels: int) -> int:
        """A step accepts up to K + 1 tokens."""
        return levels + 1

    def prepare(self, sequence: SequenceState, levels: int) -> None:
        """Run the rows below the first pass."""
        while (behind := sequence.table.length - self._start(sequence)) > levels:
            if behind < _FEW_ROWS and compiled(self.rows):
                self._extend_few(sequence)
            else:
                self.extend(sequence)

    def _extend_few(self, sequence: SequenceState) -> None:
        """Run the text's last rows, whichever of them are new: like :meth:`begin`, without logits."""
        state, run = self._few
        state.join([self._joined(sequence, _FEW_ROWS)])
        run()
        self.began(sequence)

    @cached_property
    def _few(self) -> tuple[StepState, Replay]:
        state = self.state(1, self._room(1), _FEW_ROWS)
        return state, recorded(partial(self._of_few, state))

    def _of_few(self, state: StepState) -> Iterator[None]:
        with torch.inference_mode():
            rows = self.ends(state, _FEW_ROWS - 1).rows(state)
            self.head.states(rows, self.before(state, _FEW_ROWS - 1), self.store)
        yield

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """One pass over the last K + 1 rows of true features, whichever of them are new."""
        rows = self.ends(state, levels).rows(state)
        return self.run(rows, self.before(state, levels))

    def began(self, sequence: SequenceState) -> None:
        """All rows of committed text are computed now."""
        self.store.mark(sequence.table, sequence.table.length)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The previous root's row is computed too, if it drafted."""
        super().collected(sequence, tree, path)
        if len(tree) > 1:
            self.store.mark(sequence.table, min(sequence.table.length, sequence.table.length - len(path) + 1))

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """A pass over the expanded nodes, each computed from its parent's state."""
        assert states is not None, "the level above has states"
        nodes = growth.expanded()
        rows = rows_of(growth.state, nodes)
        return self.run(rows, below(states, parent_rows))

    def run(self, rows: StaticRows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and states of static rows."""
        return self.now.paged(rows, hidden, self.store)

    @property
    def now(self) -> EagleHead:
        """The head, with logits of the tokens that it drafts now."""
        return self._cut if self.narrow else self.head

    def unread(self, sequence: SequenceState) -> int:
        """Tokens whose rows were not run, including the root."""
        return len(sequence.tokens) - self.store.filled(sequence.table)

    def _start(self, sequence: SequenceState) -> int:
        """The first position whose row was not run; slot 0, which has no row, is cleared."""
        filled = self.store.filled(sequence.table)
        if filled:
            return filled
        self.store.clear(sequence.table.slots(0, 1))
        return 1


class MtpDrafter(EagleDrafter):
    """Drafts with the MTP layer of the target's checkpoint."""


class PEagleDrafter(EagleDrafter):
    """Drafts with a head that guesses several tokens at once."""

    free = ahead = True

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The last rows of the text and the masks, in one pass. Its logits, level by level, are the levels' state."""
        logits = self.now.logits(self.guesses(state, levels))
        return logits[: state.size], logits

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next level's logits."""
        return marginal_logits(growth, states)

    def guesses(self, state: StepState, levels: int) -> Tensor:
        """[levels * S, H]: the output matrix's input of each level."""
        ends = self.ends(state, levels).rows(state)
        first, _ = self.head.states(ends, self.before(state, levels), self.store)
        if levels == 1:
            return first
        nodes, logits_indices = self._of_masks(state.size, levels - 1)
        assert self.head.mask is not None, "it drafts in parallel"
        masks = self.head.mask.expand(len(logits_indices), -1).contiguous()
        behind, _ = self.head.states(rows_of(state, nodes, logits_indices=logits_indices), masks, self.store)
        return torch.cat((first, behind))

    def _of_masks(self, sequences: int, count: int) -> tuple[Nodes, Tensor]:
        """The rows of masks, and their indices level by level."""
        key = sequences, count
        if key not in self._masks:
            columns = (column[:, 1:].contiguous() for column in chain_words(sequences, count + 1, self.device))
            mask = self.head.config.mask
            tokens = torch.full((sequences, count), 0 if mask is None else mask, dtype=torch.int64, device=self.device)
            logits_indices = torch.arange(count)[:, None] + count * torch.arange(sequences)
            self._masks[key] = Nodes(tokens, *columns), logits_indices.flatten().to(self.device)
        return self._masks[key]
