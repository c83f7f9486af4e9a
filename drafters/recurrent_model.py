"""A smaller model with recurrent layers drafts: a :mod:`~foresay.drafters.draft_model` with its own states.

::

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

from torch import Tensor

from foresay.drafters.draft_model import CATCH_UP_ROWS, DraftModelDrafter
from foresay.drafters.tree_builder import TreeBuilder
from foresay.kvpaging.states import StateStore, TextState
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.protocols import Rows
from foresay.spec.sequence import SequenceState
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.model_runner import ModelRunner, go_on


class RecurrentDraftDrafter(DraftModelDrafter):
    """Drafts with a model of recurrent layers. Its states advance between steps, so a device runs these in parts."""

    recurrent, whole = True, False

    def __init__(
        self,
        model: ModelRunner,
        dynamic: bool = True,
        name: str = DRAFT_MODEL,
        read: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(model, dynamic, name, read, token_ids)
        assert model.store.states is not None, "its layers are recurrent"
        self._store: StateStore = model.store.states
        self._texts: dict[str, TextState] = {}
        self._indices: dict[str, int] = {}  # the batch index of each sequence of the last passes

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
        return replace(super()._joined(sequence, reach), states=(text.page, text.spares[0]))

    # -- texts -------------------------------------------------------------------------------------------------------

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a row before the root."""
        return sequence.table.length > 0

    def _text_of(self, sequence: SequenceState) -> TextState:
        """Its state, after fewer tokens than are committed."""
        pages, table = self._store.pages, sequence.table
        text = self._texts.setdefault(sequence.id, TextState(pages))
        if text.at >= max(table.length, 1):
            text.rewind(table.length - 1)
        if not text.at and table.length:
            filled = self.model.store.filled(table)
            known = table.pages[: min(table.length - 1, filled) // pages.page_size]
            if count := pages.reach(known):
                text.adopt(count * pages.page_size, pages.checkpoints[known[count - 1]])
            text.branch = filled // pages.page_size * pages.page_size
        return text

    def _filled(self, sequence: SequenceState) -> int:
        return self._text_of(sequence).at

    def prepare(self, sequence: SequenceState, levels: int) -> None:
        """Catch up, and reserve a page for the next state."""
        super().prepare(sequence, levels)
        reserved = self._text_of(sequence).reserve()
        assert reserved, "there are state pages for all texts"

    def began(self, sequence: SequenceState) -> None:
        """The state after all committed tokens is stored now."""
        self._texts[sequence.id].read(1)
        super().began(sequence)

    def extend(self, sequence: SequenceState) -> None:
        """Read committed tokens except the last one, at most ``CATCH_UP_ROWS`` of them."""
        table, text = sequence.table, self._text_of(sequence)
        rows = text.within(min(table.length - 1 - text.at, CATCH_UP_ROWS))
        if rows <= 0:
            return
        reserved, begun, stop = text.reserve(), text.at, text.at + rows
        assert reserved, "there are state pages for all texts"
        read = self._text(sequence.tokens[begun:stop])
        self.model.run([Rows(table, read, begun, logits="none", state=text)])
        text.read(rows)
        self.model.store.mark(table, stop)
        if begun < sequence.prompt_length <= stop + 1:
            self._keep(sequence, text)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Advance the state along the path's expanded nodes."""
        grown, index = self._grown.get(sequence.id), self._indices.pop(sequence.id, None)
        super().committed(sequence, path)
        text, base = self._texts.get(sequence.id), sequence.table.length - len(path)
        if grown is not None and index is not None and text is not None and text.at == base:
            go_on(self._store, text, index, grown.rows_of(path)[: len(path) - 1])

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
                text.pages.keep(table.pool.known_as(table, at // size - 1), page)
