"""Drafters that read the target's hidden states (features).

These are in a store on the sequences' pages, each in the slot of its position: so they are reused with a prefix hit,
are independent of a sequence's place in the batch, and a captured step reads and stores them on the device. Those of
generated tokens are stored when a draft needs them, several at once: so they cost little for a text without drafts. A
text with missing features (in pages from when another drafter was used) gets no drafts until it is computed again.

Legend: H width of what is stored, R rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.drafters.growth import Growth
from foresay.drafters.levels import TreeDrafter
from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree
from foresay.verifier.graphs.capture import recorded
from foresay.verifier.graphs.proposer import AcceptedTree
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model.config import KVShape
from foresay.verifier.ops.eager import compiled

#: How many positions a recording has room for: those of a step, not those of a prompt. And how many wait at most.
_RECORDED, _MOST_WAITING = (4, 16), 64


class _Keeping:
    """Stores up to so many positions, recorded: that takes less than calling each op does. Those after the last go to
    the padding page."""

    def __init__(self, keep: Callable[[Features, Tensor, Tensor], None], features: Features, room: int) -> None:
        self._keep, self._features = keep, {n: rows.new_zeros(room, rows.shape[1]) for n, rows in features.items()}
        self._positions, self._slots = torch.zeros(2, room, dtype=torch.int64)
        self._replay = recorded(self._work)

    def _work(self) -> Iterator[None]:
        with torch.inference_mode():
            self._keep(self._features, self._positions, self._slots)
        yield

    def __call__(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        with torch.inference_mode():
            for name, rows in self._features.items():
                rows[: len(slots)] = features[name]
            self._positions[: len(slots)], self._slots[: len(slots)] = positions, slots
            self._slots[len(slots) :] = 0
        self._replay()


@dataclass(slots=True)
class _Waiting:
    """Features of the positions ``start`` to ``stop`` that are not yet stored, in order."""

    start: int
    stop: int
    features: list[Features]


class HiddenStateDrafter(TreeDrafter):
    """Owns ``hidden_states``, the store of what it keeps of them. needs: the features it reads."""

    def __init__(
        self,
        name: str,
        dynamic: bool,
        pool: PagePool,
        needs: FeatureRequest,
        hidden_states: KVStore,
        device: torch.device,
        token_ids: Tensor | None,
    ) -> None:
        super().__init__(name, dynamic, device, pool, token_ids)
        self.needs, self.hidden_states = needs, hidden_states
        self._keeping: dict[int, _Keeping] = {}
        self._waiting: dict[str, _Waiting] = {}

    @abstractmethod
    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Store the features of positions, int64[R] like their slots, on the device."""

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Store newly committed positions, unless some before them are missing."""
        length = sequence.table.length
        waiting = self._waiting.get(sequence.id)
        if waiting is not None and waiting.stop != length - _count(features):
            self._keep_waiting(sequence)
            waiting = None
        if waiting is None:
            waiting = self._waiting[sequence.id] = _Waiting(length - _count(features), length, [])
        waiting.features.append(features)
        waiting.stop = length
        if length <= sequence.prompt_length or length - waiting.start >= _MOST_WAITING:  # a prompt is published at once
            self._keep_waiting(sequence)

    def finished(self, sequence: SequenceState) -> None:
        """Store what waits, since other requests may reuse its pages."""
        self._keep_waiting(sequence)
        super().finished(sequence)

    def _keep_waiting(self, sequence: SequenceState) -> None:
        """Store the features that wait, unless their positions were dropped by a preemption."""
        waiting, table = self._waiting.pop(sequence.id, None), sequence.table
        if waiting is None or waiting.stop > table.length:
            return
        features, *more = waiting.features
        if more:
            features = {name: torch.cat([rows, *(each[name] for each in more)]) for name, rows in features.items()}
        positions, slots = torch.arange(waiting.start, waiting.stop), table.slots(waiting.start, waiting.stop)
        room = next((room for room in _RECORDED if room >= len(positions)), 0)
        if room and compiled(self.hidden_states.layer(0)[0]):
            if not self._keeping:
                assert self.needs is not None, "it reads hidden states"
                # Other drafters may request more: the features are the union of all requests.
                own = {name: features[name] for name in self.needs.names}
                self._keeping = {room: _Keeping(self.keep, own, room) for room in _RECORDED}
            self._keeping[room](features, positions, slots)
        else:
            self.keep(features, positions.to(self.device), slots.to(self.device))
        self._mark(table, waiting.start, waiting.stop)

    def stored(self, sequence: SequenceState, count: int) -> None:
        """The last ``count`` positions were stored."""
        self._keep_waiting(sequence)
        self._mark(sequence.table, sequence.table.length - count, sequence.table.length)

    def _mark(self, table: PageTable, start: int, stop: int) -> None:
        """Mark these positions as stored, if all before them are."""
        if self.hidden_states.filled(table) >= start:
            self.hidden_states.mark(table, stop)

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a text, with all its features."""
        return bool(sequence.table.length) and self.knows(sequence)

    def knows(self, sequence: SequenceState) -> bool:
        """Whether the features of all committed positions are stored."""
        self._keep_waiting(sequence)
        return self.hidden_states.filled(sequence.table) == sequence.table.length

    def follow(self, state: StepState, taken: AcceptedTree, levels: int) -> None:
        """Store the features of the accepted path. What is stored after it is scratch, as its slots are."""
        path, slots = (each[:, : levels + 1] for each in (taken.paths.paths, taken.slots))
        order = torch.arange(state.size, device=path.device)[:, None]
        places = (path.clamp(min=0) + order * taken.slots.shape[1]).flatten()
        positions = state.lengths.long()[:, None] + torch.arange(path.shape[1], device=path.device)
        assert self.needs is not None, "it reads hidden states"
        read = {name: taken.features[name].index_select(0, places) for name in self.needs.names}
        self.keep(read, positions.flatten(), slots.flatten())

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The features of the path are stored now."""
        self.stored(sequence, len(path))


def _count(features: Features) -> int:
    """How many positions these features are of."""
    return len(next(iter(features.values())))


class FeatureDrafter(HiddenStateDrafter):
    """A drafter that stores the features themselves, fused. width, dtype: of what is stored, H the width."""

    def __init__(
        self,
        name: str,
        dynamic: bool,
        pool: PagePool,
        needs: FeatureRequest,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        token_ids: Tensor | None,
    ) -> None:
        features = KVStore(pool, [KVShape(1, width, 0)], dtype, device)
        super().__init__(name, dynamic, pool, needs, features, device, token_ids)

    @abstractmethod
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the target's features, fused to what is stored."""

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Store the fused features."""
        self.rows.index_copy_(0, slots, self.fuse(features))

    @property
    def rows(self) -> Tensor:
        """[slots, H]: the features of all pages."""
        return self.hidden_states.layer(0)[0][:, 0]

    def before(self, state: StepState, levels: int) -> Tensor:
        """[S * F, H]: the features for the tokens of the first pass, those of one position before."""
        return self.rows.index_select(0, self.ends(state, levels).slots_before(state))


def marginal_logits(growth: Growth, logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the next level, as :meth:`foresay.drafters.growth.Passes.next` returns them, and those of all
    levels.

    logits: fp32[levels * S, V'], level by level.
    """
    assert logits is not None, "the logits of all levels"
    depth, size = len(growth.levels), growth.state.size
    own = logits[depth * size : (depth + 1) * size]
    if growth.plan.apart:
        own = own.repeat_interleave(growth.plan.levels[depth].front, dim=0)
    return own, logits
