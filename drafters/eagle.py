"""An EAGLE head proposes, level by level, a chain or a tree.

::

    position          0     1     2     3    4 = length          row p is made of token p and the feature of p - 1
    features         f0    f1    f2    f3                        the target's own, fused; stored when they are committed
    head's KV     nothing   r1    r2    r3 | r4  drafted         r4 is the root's; drafted rows are scratch

All that is known of a text lies in its pages: the fused features in one store, the head's keys and values in another.
So nothing is kept of a sequence. Before it drafts, the head runs the committed rows it has not run yet with their true
features, in one pass with the root; what it drafted is never kept. A text whose features nobody stored (pages from a
time when another drafter was asked) gets no drafts until it is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

import torch
from torch import Tensor
from torch.nn import functional

from drafters.growth import Growth
from drafters.levels import TreeDrafter
from kvpaging import KVStore, PagePool, PageTable
from spec.features import Features
from spec.names import EAGLE, EAGLE3
from spec.protocols import FeatureRequest, Rows, Wanted
from spec.sequence import Sequence
from verifier.graphs.rows import rows_of
from verifier.heads.eagle import EagleHead
from verifier.ops.level import known_tokens
from verifier.paged_rows import StaticRows

log = logging.getLogger("foresay.drafters")

#: Committed text is caught up in pieces of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256


class EagleDrafter(TreeDrafter):
    """Drafts with a head. Owns the two stores."""

    def __init__(self, head: EagleHead, pool: PagePool, dynamic: bool = True, name: str = "") -> None:
        layer, device = head.layer, head.device
        super().__init__(name or (EAGLE3 if head.config.generation == 3 else EAGLE), dynamic, device, pool)
        self.needs: FeatureRequest | None = head.config.needs
        self.store = KVStore(pool, layer.num_layers, layer.num_kv_heads, layer.head_dim, head.dtype, device)
        self.features = KVStore(pool, 1, 1, layer.hidden_size, head.dtype, device, value_dim=0)
        self.head, self.token_ids = head, head.token_ids
        self._warned = False

    @property
    def trained_positions(self) -> int:
        """The longest text the head was made for, by its configuration."""
        return self.head.layer.max_positions

    def observe(self, sequence: Sequence, features: Features) -> None:
        """Fuse and store the features of newly committed positions, unless some before them are missing."""
        table, fused = sequence.table, self.head.fuse(features)
        self.features.keys[0, table.slots(table.length - len(fused), table.length), 0] = fused
        self.stored(table, len(fused))

    def stored(self, table: PageTable, count: int, ran: bool = False) -> None:
        """The features of the last ``count`` positions were stored; ran: and the row of the first of them was run."""
        self._warn(table.length)
        start = table.length - count
        if self.features.filled(table) >= start:
            self.features.mark(table, table.length)
        if ran:
            self.store.mark(table, min(table.length, start + 1))

    def _warn(self, length: int) -> None:
        """Say once that a text is longer than any the head was trained on."""
        if length > self.trained_positions and not self._warned:
            self._warned = True
            log.warning(
                "a text has passed %d tokens, the longest the %s head was trained on: it may guess worse from here on",
                self.trained_positions,
                self.name,
            )

    def extend(self, sequence: Sequence) -> None:
        """Run committed rows that were not run yet, at most ``_CATCH_UP_ROWS`` of them."""
        table = sequence.table
        if self.knows(sequence) and table.length:
            start = self._start(sequence)
            stop = min(table.length, start + _CATCH_UP_ROWS)
            if stop > start:
                rows = self._text(sequence, start, stop, "none")
                self.head.run([rows], self._true_features(sequence, start, stop), self.store)
            self.store.mark(table, stop)

    def able(self, sequence: Sequence) -> bool:
        """Whether there is a text, and the features of all of it."""
        return bool(sequence.table.length) and self.knows(sequence)

    def first(self, sequences: Many[Sequence]) -> tuple[Tensor, Tensor]:
        """One pass over the rows that were not run yet, the roots' last. Those of committed text are marked."""
        rows = [self._with_root(sequence) for sequence in sequences]
        ends = [part.table.length + 1 for part in rows]
        spans = zip(sequences, rows, ends, strict=True)
        hidden = [self._true_features(sequence, part.base, end) for sequence, part, end in spans]
        logits, states, _ = self.head.run(rows, torch.cat(hidden), self.store)
        for part in rows:
            self.store.mark(part.table, part.table.length)
        return logits, states

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """A pass over the expanded nodes, each made of the state of the node it hangs on."""
        assert states is not None, "the level above has states"
        nodes = growth.expanded()
        rows, _ = rows_of(growth.state, nodes._replace(tokens=known_tokens(nodes.tokens, self.head.vocab_size)))
        return self.run(rows, states if places is None else _below(states, places))

    def run(self, rows: StaticRows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and states of static rows; of two rows at least, since a GPU's products need them."""
        short = len(rows.tokens) - len(hidden)
        return self.head.paged(rows, functional.pad(hidden, (0, 0, 0, short)) if short else hidden.clone(), self.store)

    def knows(self, sequence: Sequence) -> bool:
        """Whether the features of all committed positions are there."""
        return self.features.filled(sequence.table) == sequence.table.length

    def unread(self, sequence: Sequence) -> int:
        """Tokens whose rows were not run, the root among them."""
        return len(sequence.tokens) - self.store.filled(sequence.table)

    def _start(self, sequence: Sequence) -> int:
        """The first position whose row was not run; slot 0, of which no row is made, is cleared."""
        filled = self.store.filled(sequence.table)
        if filled:
            return filled
        first = sequence.table.slots(0, 1)
        self.store.keys[:, first] = 0
        self.store.values[:, first] = 0
        return 1

    def _with_root(self, sequence: Sequence) -> Rows:
        """The rows from the first one not run to the root; long stretches run beforehand."""
        while sequence.table.length - self._start(sequence) > _CATCH_UP_ROWS:
            self.extend(sequence)
        start = self._start(sequence)
        return self._text(sequence, start, sequence.table.length + 1, "last")

    def _text(self, sequence: Sequence, start: int, stop: int, wanted: Wanted) -> Rows:
        return Rows(sequence.table, torch.tensor(sequence.tokens[start:stop]), start, wanted=wanted)

    def _true_features(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """[R, H]: what the rows of positions start .. stop - 1 are made of, the features one place before."""
        return self.features.keys[0, sequence.table.slots(start - 1, stop - 1), 0]


def _below(states: Tensor, places: Tensor) -> Tensor:
    """[S * F, H]: the states of the nodes that others hang on. states: [S * F', H]. places: int64[S, F]."""
    by_sequence = states.view(len(places), -1, states.shape[1])
    return by_sequence.gather(1, places[:, :, None].expand(-1, -1, states.shape[1])).flatten(0, 1)
