"""Drafters that read the target's hidden states (features).

These are in a store on the sequences' pages, each in the slot of its position: so they are reused with a prefix hit,
are independent of a sequence's index in the batch, and a captured step reads and stores them on the device. On a CPU
they are stored when a draft needs them, and wait until then as the pass returned them: so they cost next to nothing
for a text without drafts. A text that is drafted for reuses only pages that have them, so where they are missing (in
pages on disk from when another drafter was used) it is computed again, once.

Legend: H width of what is stored, R rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.drafters.growth import Growth
from foresay.drafters.levels import TreeDrafter
from foresay.kvpaging import KVStore, PagePool, PageTable, Store
from foresay.spec.protocols import FeatureReader, FeatureRequest, Features, RowFeatures
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree
from foresay.verifier.graphs.capture import recorded
from foresay.verifier.graphs.proposer import AcceptedTree, KeepsFeatures
from foresay.verifier.graphs.state import StepState, sent
from foresay.verifier.model.config import KVShape
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.rows import put_rows, take_rows
from foresay.verifier.ops.trees import rows_of_paths

#: How many positions a recording has room for: those of a step, not those of a prompt.
_RECORDED = (4, 16)
#: How many positions of all texts may wait on a GPU, and bytes on a CPU. At most so many are stored at a text's end:
#: with more, nothing was drafted for it lately.
_MOST_WAITING, _MOST_BYTES, _FEW = 64, 64 << 20, 64


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
    """Features of the positions ``start`` to ``stop`` of a page that are not yet stored, in order."""

    start: int
    stop: int
    features: list[Features]

    def joined(self) -> Features:
        """The features of all positions."""
        features, count = joined(self.features), self.stop - self.start
        return {name: rows[:count] for name, rows in features.items()}


class WaitingFeatures(Store):
    """Features by page, the oldest pages first, until they are in the store of hidden states. Only computing a text
    gives them: one that is drafted for shares only pages that have them. rows: how many positions wait. keep: stores
    those of positions, int64[R] like their slots."""

    drafts = True

    def __init__(self, hidden_states: KVStore, keep: Callable[[Features, Tensor, Tensor], None]) -> None:
        self.pages: OrderedDict[int, _Waiting] = OrderedDict()
        self.hidden_states, self._keep = hidden_states, keep
        self.rows, self._page_size = 0, hidden_states.pool.page_size

    def add(self, page: int, start: int, count: int, features: Features) -> None:
        """The next positions of a page."""
        waiting = self.pages.get(page)
        if waiting is None or waiting.stop != start:
            self.take(page)
            waiting = self.pages[page] = _Waiting(start, start, [])
        waiting.features.append(features)
        waiting.stop += count
        self.rows += count

    def take(self, page: int) -> _Waiting | None:
        """What waits of a page, which waits no longer."""
        waiting = self.pages.pop(page, None)
        if waiting is not None:
            self.rows -= waiting.stop - waiting.start
        return waiting

    def forget(self, page: int) -> None:
        """They go with the page."""
        self.take(page)

    def copy(self, source: int, destination: int) -> None:
        """Nothing waits of the copy: what did of the page is stored."""
        self.flush(source)
        self.hidden_states.copy(source, destination)

    def clamp(self, page: int, rows: int) -> None:
        """The page's rows after the first ``rows`` are not text any more."""
        waiting = self.pages.get(page)
        if waiting is not None and (waiting.stop - 1) % self._page_size >= rows:
            self.flush(page)
            self.hidden_states.clamp(page, rows)

    def restorable(self, pages: Sequence[int]) -> int:
        """How many leading pages have all features."""
        return next((count for count, page in enumerate(pages) if not self.covers(page)), len(pages))

    def covers(self, page: int) -> bool:
        """Whether the features of all its positions are stored, or wait."""
        mark, size, waiting = self.hidden_states.marks[page], self._page_size, self.pages.get(page)
        return mark == size or (waiting is not None and waiting.start % size <= mark and waiting.stop % size == 0)

    def inherit(self, known: int, page: int) -> bool:
        """Copy them."""
        if self.covers(page) and not self.covers(known):
            self.take(known)
            self.copy(page, known)
        return True

    def flush(self, page: int) -> None:
        """Store what waits of a page."""
        waiting, marks, size = self.take(page), self.hidden_states.marks, self._page_size
        if waiting is not None:
            first = page * size + waiting.start % size
            slots = torch.arange(first, first + waiting.stop - waiting.start)
            self._keep(waiting.joined(), torch.arange(waiting.start, waiting.stop), slots)
            if marks[page] >= waiting.start % size:
                marks[page] = max(marks[page], 1 + (waiting.stop - 1) % size)


class HiddenStateDrafter(TreeDrafter, KeepsFeatures, FeatureReader):
    """Keeps what it needs of them."""

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The features of the path are stored now."""
        self.stored(sequence, len(path))


class TextStateDrafter(HiddenStateDrafter):
    """Keeps them of whole texts. Owns ``hidden_states``, the store of what it keeps. needs: the features it reads."""

    def __init__(self, name: str, needs: FeatureRequest, hidden_states: KVStore, token_ids: Tensor | None) -> None:
        pool = hidden_states.pool
        super().__init__(name, hidden_states.device, pool, token_ids)
        self.needs, self.hidden_states, hidden_states.drafts = needs, hidden_states, True
        self._pool, self._waiting = pool, pool.attach(WaitingFeatures(hidden_states, self._store))
        self._most = 0  # positions that may wait
        self._keeping: dict[int, _Keeping] = {}

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Newly committed positions wait in their pages until a draft needs them. If too many do, the oldest are
        stored; a prompt's, if they alone are too many, at once."""
        waiting, table, size, stop = self._waiting, sequence.table, self._pool.page_size, sequence.table.length
        start = first = stop - _count(features)
        if not self._most:  # the same in all steps
            row = sum([rows[:1].nbytes for rows in features.values()])
            self._most = _MOST_BYTES // row if self.device.type == "cpu" else _MOST_WAITING
        if stop - start > self._most:
            self._store(features, torch.arange(start, stop), table.slots(start, stop))
            self.stored(sequence, stop - start)
            return
        while start < stop:
            end = min(stop, start - start % size + size)
            whole = end - start == stop - first
            part = features if whole else {n: rows[start - first : end - first] for n, rows in features.items()}
            waiting.add(table.pages[start // size], start, end - start, part)
            start = end
        while waiting.rows > self._most:
            waiting.flush(next(iter(waiting.pages)))

    def finished(self, sequence: SequenceState) -> None:
        """Store the last features, since other requests may reuse their pages."""
        if sequence.table.length - self.hidden_states.filled(sequence.table) <= _FEW:
            self._store_waiting(sequence)
        super().finished(sequence)

    def _store_waiting(self, sequence: SequenceState) -> None:
        """Store what waits of a text, if nothing before it is missing."""
        table, size, found = sequence.table, self._pool.page_size, list[_Waiting]()
        stop = self.hidden_states.filled(table)
        for page in table.pages[stop // size :]:
            waiting = self._waiting.pages.get(page)
            if waiting is None or waiting.start > stop:
                break
            self._waiting.take(page)
            found.append(waiting)
            stop = min(waiting.stop, table.length)
        if found:
            start = found[0].start
            features = joined([each for waiting in found for each in waiting.features])
            self._store(features, torch.arange(start, stop), table.slots(start, stop))
            self._mark(table, start, stop)

    def _store(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        room = next((room for room in _RECORDED if room >= len(positions)), 0)
        features = {name: rows[: len(slots)] for name, rows in features.items()}
        if not room or not compiled(self.hidden_states.layer(0)[0]):
            self.keep(features, sent(positions, self.device), sent(slots, self.device))
            return
        if not self._keeping:
            assert self.needs is not None, "it reads hidden states"
            # Other drafters may request more: the features are the union of all requests.
            own = {name: features[name] for name in self.needs.names}
            self._keeping = {room: _Keeping(self.keep, own, room) for room in _RECORDED}
        self._keeping[room](features, positions, slots)

    def stored(self, sequence: SequenceState, count: int) -> None:
        """The last ``count`` positions were stored."""
        self._store_waiting(sequence)
        self._mark(sequence.table, sequence.table.length - count, sequence.table.length)

    def _mark(self, table: PageTable, start: int, stop: int) -> None:
        """Mark these positions as stored, if all before them are."""
        if self.hidden_states.filled(table) >= start:
            self.hidden_states.mark(table, stop)

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a text, with all its features."""
        length = sequence.table.length
        if not length or self.knows(sequence):
            return bool(length)
        missing = length - self.hidden_states.filled(sequence.table)
        sequence.unable = f"{self.name} cannot draft: the target's hidden states of {missing:,} tokens are missing."
        return False

    def knows(self, sequence: SequenceState) -> bool:
        """Whether the features of all committed positions are stored."""
        self._store_waiting(sequence)
        return self.hidden_states.filled(sequence.table) == sequence.table.length

    def follow(self, state: StepState, taken: AcceptedTree, levels: int) -> None:
        """Store the features of the accepted path. What is stored after it is scratch, as its slots are."""
        count = min(levels + 1, taken.slots.shape[1])
        rows, positions, slots = rows_of_paths(taken.paths.paths, taken.slots, state.lengths, count)
        assert self.needs is not None, "it reads hidden states"
        self.keep({name: take_rows(taken.features[name], rows) for name in self.needs.names}, positions, slots)


def _count(features: Features) -> int:
    """How many positions these features are of."""
    return 1 if isinstance(features, RowFeatures) else len(next(iter(features.values())))


def joined(parts: Sequence[Features]) -> Features:
    """The features of positions one after the other."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def feature_store(pool: PagePool, width: int, dtype: torch.dtype, device: torch.device) -> KVStore:
    """A store of fused features, H wide."""
    return KVStore(pool, [KVShape(1, width, 0)], dtype, device)


class FeatureDrafter(TextStateDrafter):
    """A drafter that stores the features themselves, fused (:func:`feature_store`)."""

    @abstractmethod
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the target's features, fused to what is stored."""

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Store the fused features."""
        put_rows(self.rows, slots, self.fuse(features))

    @property
    def rows(self) -> Tensor:
        """[slots, H]: the features of all pages."""
        return self.hidden_states.layer(0)[0][:, 0]

    def before(self, state: StepState, levels: int) -> Tensor:
        """[S * F, H]: the features for the tokens of the first pass, those of one position before."""
        return take_rows(self.rows, self.ends(state, levels).slots_before(state))


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
