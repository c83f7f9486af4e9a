"""Gemma 4's assistants draft, level by level, a chain or a tree, over the target's own keys and values.

::

    position     0 .. length - 1        length   length ..
    rows         the target's           root     nodes, all at the root's position
    reads        the state before the root, then each node's parent's own

An assistant keeps nothing: no prompt to read, nothing to catch up with or to roll back
(:mod:`foresay.verifier.heads.assistant`). Of the target's states it needs the last one alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foresay.drafters.growth import Growth, below
from foresay.drafters.last_state import LastStateDrafter
from foresay.kvpaging import KVStore
from foresay.spec.names import MTP
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.rows import Nodes, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.assistant import AssistantHead
from foresay.verifier.ops.trees import positions_below, text_ends

#: The root and the token before it, whose slot is the last with keys.
_REACH = 2


class AssistantDrafter(LastStateDrafter):
    """store: the target's, which is only read."""

    def __init__(self, assistant: AssistantHead, store: KVStore, name: str = MTP) -> None:
        width = assistant.decoder.embedding.shape[1]
        super().__init__(name, store.pool, width, assistant.dtype, assistant.device)
        self.assistant, self.store, self.windows = assistant, store, store.windows
        self._columns: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def reach(self, levels: int) -> int:
        """The root and the token before it."""
        return _REACH

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """A row for each root."""
        rows = self._rows(state, state.roots[:, None].contiguous())
        return self.assistant.paged(rows, self.before(state, rows.slots), self.store)

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """A row for each expanded node."""
        assert states is not None, "the level above has states"
        rows = self._rows(growth.state, growth.expanded().tokens)
        return self.assistant.paged(rows, below(states, parent_rows), self.store)

    def _rows(self, state: StepState, tokens: Tensor) -> StaticRows:
        """Rows that attend as each text's last one does, in whose slots they are. tokens: int64[S, F]."""
        numbers, words, depths, before = self._columns_of(state.size, tokens.shape[1])
        lengths = text_ends(state.recent, state.lengths, _REACH, 0).lengths
        rows = rows_of(state, Nodes(tokens, numbers, words, depths), lengths, None, live=True, store=self.store)
        return replace(rows, positions=positions_below(state.ends, before))

    def _columns_of(self, sequences: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers, words and depths of the first node of each text, ``count`` times; and the depth above."""
        key = sequences, count
        if key not in self._columns:
            zeros = torch.zeros(key, dtype=torch.int64).to(self.device)
            self._columns[key] = zeros, zeros + 1, zeros.int(), zeros.int() - 1
        return self._columns[key]
