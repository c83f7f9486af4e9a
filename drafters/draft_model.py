"""A smaller model drafts, level by level, a chain or a tree (:mod:`foresay.drafters.growth`).

It adds the *same* position-keyed noise to its logits as the target's sampling will (at the request's temperature), so
the likeliest child of a node is the draft's own shared-noise sample, and the next ones are its runners-up: the coupling
of :mod:`foresay.spec.accept`.

Its KV is in its own store, on the sequences' pages: committed text is caught up in one pass, expanded nodes are scratch
rows past the committed length, and those of an accepted path are kept::

    text        ... p-1  root          before it drafts: one pass over the last committed token and the root
    slots      length-1  length        (the former's row is there already unless it was the tree's last leaf)
    levels      length + node          a pass for each further level, over its expanded nodes

After a captured step the rows of accepted nodes move down as the target's do: they are in the same slots.

A model with recurrent layers has its own states::

    state of     length - 1 tokens              length                         in state pages of its own
    begin        the last committed token ───>  root                           a row of the text, then a node
    levels                                      root, and all nodes expanded so far; logits of the last ones

The states of the level above are not stored. So each pass computes the nodes above its own again: its time is reading
the weights, whatever the number of rows. The last pass writes records of all expanded nodes; those of the accepted path
are replayed, except for its last node, with which the next step begins.

A text with a known prefix is read from this model's last checkpoint in it; checkpoints are kept at the end of a prompt,
of a text, and where one text diverged from another. Missing parts are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foresay.drafters.growth import Growth
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.tree_builder import TreeBuilder
from foresay.kvpaging.states import StateStore, TextState
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.protocols import Rows
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.proposer import AcceptedTree
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.forward import forward
from foresay.verifier.model_runner import ModelRunner, replay_state
from foresay.verifier.ops.trees import known_tokens, move_paths

#: Committed text is caught up in chunks of at most this many rows, to bound the pass's memory.
CATCH_UP_ROWS = 256
#: The last committed token, which has no row here if it was a tree's leaf, and the root.
_REACH = 2


class DraftModelDrafter(TreeDrafter):
    """Drafts with a :class:`~foresay.verifier.model_runner.ModelRunner`.

    If its vocabulary differs from the target's: read: int64[V], the model's id of each of the target's tokens;
    token_ids: int64[V'], the target's id of each of its logits. None if they are the same. vocabulary: the tokens that
    it drafts, if not all.
    """

    def __init__(
        self,
        model: ModelRunner,
        name: str = DRAFT_MODEL,
        read: Tensor | None = None,
        token_ids: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        device = model.store.device
        super().__init__(name, device, model.store.pool, token_ids)
        self.model, self.vocabulary = model, vocabulary
        self._cut = model.decoder if vocabulary is None else vocabulary.restrict(model.decoder)
        self._read, self._known = read, model.vocab_size if read is None else len(read)
        self._read_there = None if read is None else read.to(device)
        # Of recurrent layers: the state of each text, and its batch index in the last passes.
        self._texts, self._indices = dict[str, TextState](), dict[str, int]()

    def reach(self, levels: int) -> int:
        """The last committed token and the root."""
        return _REACH

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, None]:
        """A pass over the last committed token and the root."""
        return self.logits(self.ends(state, levels).rows(state, self.known, live=True)), None

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, None]:
        """A pass over the expanded nodes."""
        return self.logits(growth.rows(self.model.store, self.known)), None

    def logits(self, rows: StaticRows) -> Tensor:
        """fp32[W, V']: the logits of static rows."""
        return forward(self._cut if self.narrow else self.model.decoder, rows, self.model.store)[0]

    def known(self, tokens: Tensor) -> Tensor:
        """The tokens as ids of this model."""
        return known_tokens(tokens, self._known, self._read_there)

    def prepare(self, sequence: SequenceState, levels: int) -> None:
        """Catch up until all but the last committed token have KV."""
        while self.unread(sequence) > _REACH:
            self.extend(sequence)

    def began(self, sequence: SequenceState) -> None:
        """All committed tokens have KV now."""
        self.model.store.mark(sequence.table, sequence.table.length)

    def follow(self, state: StepState, taken: AcceptedTree, levels: int) -> None:
        """Move the rows of accepted nodes down. A leaf has none; the next step computes it before it drafts."""
        if not taken.tree.chain:
            sources, count = taken.own_rows()
            for arrays in self.model.store.arrays:
                move_paths(arrays.tensors, sources, taken.slots, count)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Mark the rows that exist: of the path's nodes all but a leaf."""
        table = sequence.table
        inner = set(tree.parents)
        rows = sum(node in inner for node in path if node >= 0) if len(tree) > 1 else 0
        self.model.store.mark(table, table.length - len(path) + rows)

    def after_rounds(self, sequence: SequenceState, count: int, path: list[int]) -> None:
        """It has rows of the nodes before the last round, and of the last round's root."""
        self.collected(sequence, DraftTree.chain([0] * (count + 2)), path)

    def _text(self, tokens: list[int]) -> Tensor:
        """int64[R], on the host."""
        ids = torch.tensor(tokens)
        return ids.clamp_(max=self.model.vocab_size - 1) if self._read is None else self._read[ids]

    def _filled(self, sequence: SequenceState) -> int:
        return sequence.table.length - self.model.missing(sequence.table)

    def unread(self, sequence: SequenceState) -> int:
        """Tokens without KV here, including the root."""
        return len(sequence.tokens) - self._filled(sequence)

    def extend(self, sequence: SequenceState) -> None:
        """Compute KV for committed tokens that have none, at most ``CATCH_UP_ROWS`` of them."""
        table, filled = sequence.table, self._filled(sequence)
        stop = min(table.length, filled + CATCH_UP_ROWS)
        if stop > filled:
            self.model.run([Rows(table, self._text(sequence.tokens[filled:stop]), filled, logits="none")])
            self.model.store.mark(table, stop)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Keep the rows of the accepted nodes that were expanded; update the calibration."""
        g = self._grown.get(sequence.id)
        super().committed(sequence, path)
        if g is None:
            return
        table, rows = sequence.table, g.rows_of(path)
        base = table.length - len(path)
        jumped = [(row, depth) for depth, row in enumerate(rows) if row != depth]
        if jumped:
            slots = table.slots(base, base + max(rows) + 1)
            sources, destinations = zip(*jumped, strict=True)
            self.model.store.move(slots[torch.tensor(sources)], slots[torch.tensor(destinations)])
        self.model.store.mark(table, base + len(rows))


class RecurrentDraftDrafter(DraftModelDrafter):
    """Drafts with a model of recurrent layers. Its states advance between steps, so a device runs these in parts."""

    recurrent, whole = True, False

    @property
    def _store(self) -> StateStore:
        assert self.model.store.states is not None, "its layers are recurrent"
        return self.model.store.states

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, None]:
        """The text's last row and the root."""
        assert state.states is not None, "with columns for them"
        return self.logits(state.states.with_states(self.ends(state, levels).rows(state, self.known, True), True)), None

    def _grow(self, growing: Sequence[TreeBuilder], apart: bool) -> None:
        super()._grow(growing, apart)
        self._indices = {grown.sequence.id: index for index, grown in enumerate(growing)}

    def _joined(self, sequence: SequenceState, reach: int) -> BatchSlot:
        text = self._texts[sequence.id]
        return replace(super()._joined(sequence, reach), states=(text.page, text.free_pages[0]))

    # -- texts -------------------------------------------------------------------------------------------------------

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a row before the root."""
        return sequence.table.length > 0

    def _text_of(self, sequence: SequenceState) -> TextState:
        """Its state, after fewer tokens than are committed."""
        pages, table = self._store.pages, sequence.table
        text = self._texts.setdefault(sequence.id, TextState(pages))
        if text.length >= max(table.length, 1):
            text.restore(table.length - 1)
        if not text.length and table.length:
            filled = self.model.store.filled(table)
            known = table.pages[: min(table.length - 1, filled) // pages.page_size]
            text.adopt(known[: pages.restorable(known)], filled // pages.page_size * pages.page_size)
        return text

    def _filled(self, sequence: SequenceState) -> int:
        return self._text_of(sequence).length

    def prepare(self, sequence: SequenceState, levels: int) -> None:
        """Catch up, and reserve a page for the next state."""
        super().prepare(sequence, levels)
        self._reserve(self._text_of(sequence))

    def _reserve(self, text: TextState) -> None:
        if not text.refill():
            for other in self._texts.values():
                other.drop_checkpoints()
            reserved = text.refill()
            assert reserved, "there are state pages for what all texts need"

    def began(self, sequence: SequenceState) -> None:
        """The state after all committed tokens is stored now."""
        self._texts[sequence.id].commit_rows(1)
        super().began(sequence)

    def extend(self, sequence: SequenceState) -> None:
        """Read committed tokens except the last one, at most ``CATCH_UP_ROWS`` of them."""
        table, text = sequence.table, self._text_of(sequence)
        rows = text.align_chunk(min(table.length - 1 - text.length, CATCH_UP_ROWS))
        if rows <= 0:
            return
        self._reserve(text)
        begun, stop = text.length, text.length + rows
        read = self._text(sequence.tokens[begun:stop])
        self.model.run([Rows(table, read, begun, logits="none", state=text)])
        text.commit_rows(rows)
        self.model.store.mark(table, stop)
        if begun < sequence.prompt_length <= stop + 1:
            self._keep(sequence, text)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Advance the state along the path's expanded nodes."""
        grown, index = self._grown.get(sequence.id), self._indices.pop(sequence.id, None)
        super().committed(sequence, path)
        text, base = self._texts.get(sequence.id), sequence.table.length - len(path)
        if grown is not None and index is not None and text is not None and text.length == base:
            replay_state(self._store, text, index, grown.rows_of(path)[: len(path) - 1])

    def finished(self, sequence: SequenceState) -> None:
        """Its checkpoints stay for other requests."""
        super().finished(sequence)
        if (text := self._texts.pop(sequence.id, None)) is not None:
            self._keep(sequence, text)
            text.release()

    def _keep(self, sequence: SequenceState, text: TextState) -> None:
        """The states at page boundaries become checkpoints."""
        table, size = sequence.table, text.pages.page_size
        for at, page in text.boundaries:
            if 0 < at <= table.length:
                text.pages.add_checkpoint(table.pool.cached_page(table, at // size - 1), page)
