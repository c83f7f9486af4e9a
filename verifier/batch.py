"""ForwardBatch: the one record of everything a forward pass reads besides weights and KV.

Built once per pass from the :class:`~spec.protocols.Rows` of its sequences; every layer then reads the same indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spec.protocols import Rows

#: Batched products of few rows take another path in the library, with other bits; fewer rows than this are padded, or
#: more where it was found (:func:`verifier.ops.spans.least_rows`).
LEAST_ROWS = 8
#: Weighted values are summed over so many positions at once, if pages are no longer: few sums of many terms are faster
#: than many of few.
SPAN = 64
#: [r, X] -> [M, X]: how a segment's rows are stacked for a product.
Stack = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Segment:
    """Where the keys of one sequence's rows are. ``S`` is the page size, positions are grouped in blocks of S.

    rows: slice of the batch's rows. group: query heads of a kv head. least: rows of a product, at least. blocks: key
    blocks a row may see. full: leading blocks that hold committed tokens only. used: slots in use, counted from
    position 0 (committed ones, this pass's rows and those of a tree's levels before it); what they hold is finite.
    resident: slots read.
    first_slot: first slot if the pages are side by side; otherwise ``slots`` int64[resident] names them all.
    tail_mask: bool[M, W], which of the last W = resident - full*S slots are hidden, per stacked row. They hold the last
    T = blocks - full blocks of positions; those of a chain and nothing else.
    window_mask: bool[M, resident] where a sliding window hides committed keys, else None.
    path_columns: int64[M, T*S] for a tree: which of the W slots is the key at each position of the tail, a hidden one
    where the path has ended. span: positions whose values are summed before sums are added up, whole pages; of a tree,
    begin: where the spans begin that may hold its slots, and tail_spans: fp32[P, M, resident - begin], one where the
    slot's position is in the span, else zero; None if there is but one span. first: positions below hold nothing and
    are not seen; their values must be finite. sifted: values need not be finite; a row that sees one
    that is not is NaN.
    """

    rows: slice
    group: int
    least: int
    page_size: int
    blocks: int
    full: int
    used: int
    resident: int
    first_slot: int
    slots: Tensor | None
    tail_mask: Tensor
    window_mask: Tensor | None
    path_columns: Tensor | None = None
    span: int = 0
    begin: int = 0
    tail_spans: Tensor | None = None
    first: int = 0
    sifted: bool = False


def _pair(rows: int) -> int:
    return max(2, rows)


@dataclass(slots=True)
class ForwardBatch:
    """Inputs of one pass. R rows, padded to a number that matrix products take: none of them may see a single row.

    tokens, positions: int64[R]. slots: int64[live], where the live rows' KV goes. live: rows that are no padding.
    wanted: int64[W], the rows whose logits are needed; starts: where each sequence's begin.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    live: int
    segments: list[Segment]
    wanted: Tensor
    starts: list[int]

    @classmethod
    def build(
        cls,
        rows: Many[Rows],
        group: int,
        window: int | None,
        fitting: Callable[[int], int] = _pair,
        least: int = LEAST_ROWS,
    ) -> ForwardBatch:
        """Lay out the rows of all sequences. group: query heads per kv head. window: the sliding window, if any.
        fitting: how many rows a product of so many takes. least: rows of a batched one."""
        segments, positions, slots, starts, first = [], [], [], [0], 0
        wanted: list[int] = []
        for part in rows:
            layout = _Layout.of(part)
            segments.append(layout.segment(first, group, window, least))
            positions.append(layout.positions)
            slots.append(layout.slots())
            wanted.extend(range(*_wanted_range(part, first, layout.count)))
            starts.append(len(wanted))
            first += layout.count
        padding = torch.zeros(fitting(first) - first, dtype=torch.int64)
        return cls(
            tokens=torch.cat([*(part.tokens for part in rows), padding]),
            positions=torch.cat([*positions, padding]),
            slots=torch.cat(slots),
            live=first,
            segments=segments,
            wanted=torch.tensor(wanted, dtype=torch.int64),
            starts=starts,
        )

    def sift(self, states: Tensor) -> bool:
        """After a pass: whether it has to be run again. states: [r, H], what it made of the rows.

        A value that is not finite makes NaN of rows that do not see it, of the whole sequence. Looking for such values
        beforehand would cost every pass; this costs one sum.
        """
        again = not math.isfinite(float(states.sum(dtype=torch.float32)))
        for segment in self.segments:
            segment.sifted = again
        return again


def _wanted_range(part: Rows, first: int, count: int) -> tuple[int, int]:
    begin = {"all": first, "last": first + count - 1, "none": first + count}[part.wanted]
    return begin, first + count


@dataclass(slots=True)
class _Layout:
    """The rows of one sequence: which position and which slot each has."""

    part: Rows
    count: int
    positions: Tensor
    reach: int
    depth: int

    @classmethod
    def of(cls, part: Rows) -> _Layout:
        count = part.tokens.shape[0]
        if part.nodes is None or part.words is None:
            return cls(part, count, torch.arange(part.base, part.base + count), part.base + count, count)
        depths = [word.bit_count() - 1 for word in part.words]
        positions = torch.tensor([part.base + depth for depth in depths])
        reach = part.base + max(word.bit_length() for word in part.words)
        return cls(part, count, positions, reach, max(depths) + 1)

    def slots(self) -> Tensor:
        """int64[r]: where each row's KV goes."""
        base, table = self.part.base, self.part.table
        if self.part.nodes is None:
            return table.slots(base, base + self.count)
        return table.slots(base, self.reach)[torch.tensor(list(self.part.nodes))]

    @property
    def size(self) -> int:
        """Slots of a page."""
        return self.part.table.pool.page_size

    @property
    def full(self) -> int:
        """Leading blocks that hold committed tokens only."""
        return self.part.base // self.size

    @property
    def blocks(self) -> int:
        """Blocks up to the deepest row's position."""
        return -(-(self.part.base + self.depth) // self.size)

    @property
    def resident(self) -> int:
        """Slots up to the last row's, whole pages."""
        return -(-self.reach // self.size) * self.size

    @property
    def span(self) -> int:
        """Positions of a span."""
        return self.size * max(1, SPAN // self.size)

    @property
    def begin(self) -> int:
        """Position at which the spans begin that may hold uncommitted slots."""
        return self.part.base // self.span * self.span

    def segment(self, first: int, group: int, window: int | None, least: int) -> Segment:
        part, run = self.part, self.part.table.run
        hidden, columns = (self._chain_tail(), None) if part.words is None else self._tree_tail()
        stack = partial(_stack_rows, group=group, least=least)
        return Segment(
            rows=slice(first, first + self.count),
            group=group,
            least=least,
            page_size=self.size,
            blocks=self.blocks,
            full=self.full,
            used=self.reach,
            resident=self.resident,
            first_slot=run or 0,
            slots=None if run is not None else part.table.slots(0, self.resident),
            tail_mask=stack(hidden),
            window_mask=self._window(hidden, columns, stack, window),
            span=self.span,
            begin=self.begin,
            path_columns=None if columns is None else stack(columns),
            tail_spans=None if columns is None else self._tail_spans(columns, stack),
        )

    def _tail_positions(self) -> Tensor:
        return torch.arange(self.full * self.size, self.blocks * self.size)

    def _chain_tail(self) -> Tensor:
        """bool[r, T*S]: a row of a chain hides every later position."""
        return self._tail_positions() > self.positions[:, None]

    def _tree_tail(self) -> tuple[Tensor, Tensor]:
        """bool[r, W] hidden slots, int64[r, T*S] columns: committed positions first, then the row's path in order.

        Behind the end of a path come slots that are not on it.
        """
        assert self.part.words is not None
        begin, end = self.full * self.size, self.blocks * self.size
        committed, nodes = self.part.base - begin, self.reach - self.part.base
        words = np.array(self.part.words, dtype=np.uint64)[:, None]
        hidden = np.ones((self.count, self.resident - begin), dtype=bool)
        hidden[:, :committed] = False
        hidden[:, committed : committed + nodes] = (words >> np.arange(nodes, dtype=np.uint64)) & np.uint64(1) == 0
        columns = hidden.argsort(axis=1, kind="stable")[:, : end - begin]
        return torch.from_numpy(hidden), torch.from_numpy(columns)

    def _tail_spans(self, columns: Tensor, stack: Stack) -> Tensor | None:
        """fp32[P, M, resident - begin]: one for the slots of each span's positions."""
        numbers = (self._tail_positions() - self.begin) // self.span
        if numbers[-1] == 0:
            return None
        before = self.full * self.size - self.begin
        held = torch.zeros(int(numbers[-1]) + 1, self.count, self.resident - self.begin)
        held[0, :, :before] = 1.0
        held[numbers.expand_as(columns), torch.arange(self.count)[:, None], columns + before] = 1.0
        return torch.stack([stack(span) for span in held])

    def _window(self, hidden: Tensor, columns: Tensor | None, stack: Stack, window: int | None) -> Tensor | None:
        """bool[M, resident]: what the tail hides and what lies a window or more back; None if nothing does."""
        if window is None or self.part.base + self.depth <= window:
            return None
        begin = self.full * self.size
        last = self.positions[:, None] - window
        behind = torch.arange(begin + hidden.shape[1]) <= last
        if columns is not None:
            behind[:, begin:].scatter_(1, columns, self._tail_positions() <= last)
        behind[:, begin:] |= hidden
        return stack(behind)


def _stack_rows(rows: Tensor, group: int, least: int) -> Tensor:
    """[r, X] -> [M, X]: each row once per query head of its kv head, at least ``least`` with the last repeated."""
    stacked = rows.repeat_interleave(group, dim=0)
    short = least - stacked.shape[0]
    return torch.cat((stacked, stacked[-1:].expand(short, -1))) if short > 0 else stacked
