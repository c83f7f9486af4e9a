"""ForwardBatch: the one record of everything a forward pass reads besides weights and KV.

Built once per pass from the :class:`~spec.protocols.Rows` of its sequences; every layer then reads the same indices.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from spec.protocols import Rows


@dataclass(slots=True)
class Segment:
    """Where the keys of one sequence's rows are. ``S`` is the page size, positions are grouped in blocks of S.

    rows: slice of the batch's rows. blocks: key blocks a row may see. full: leading blocks that hold committed tokens
    only. used: slots in use, counted from position 0 (committed ones and this pass's rows). resident: slots read.
    first_slot: first slot if the pages are side by side; otherwise ``slots`` int64[resident] names them all.
    tail_mask: bool[M, W], which of the last W = resident - full*S slots are hidden, per stacked row. They hold the last
    T = blocks - full blocks of positions; those of a chain and nothing else.
    window_mask: bool[M, resident] where a sliding window hides committed keys, else None.
    path_columns: int64[M, T*S] for a tree: which of the W slots is the key at each position of the tail, a hidden one
    where the path has ended. tail_blocks: fp32[T, M, W], one where the slot's position is in the block, else zero; None
    if there is but one block. first: positions below hold nothing and are not seen; their values must be finite.
    """

    rows: slice
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
    tail_blocks: Tensor | None = None
    first: int = 0


@dataclass(slots=True)
class ForwardBatch:
    """Inputs of one pass. R rows, padded to at least two: no matrix product may see a single row.

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
    def build(cls, rows: Many[Rows], group: int, window: int | None) -> ForwardBatch:
        """Lay out the rows of all sequences. group: query heads per kv head. window: the sliding window, if any."""
        segments, positions, slots, starts, first = [], [], [], [0], 0
        wanted: list[int] = []
        for part in rows:
            layout = _Layout.of(part)
            segments.append(layout.segment(first, group, window))
            positions.append(layout.positions)
            slots.append(layout.slots())
            wanted.extend(range(*_wanted_range(part, first, layout.count)))
            starts.append(len(wanted))
            first += layout.count
        padding = torch.zeros(1 if first == 1 else 0, dtype=torch.int64)
        return cls(
            tokens=torch.cat([*(part.tokens for part in rows), padding]),
            positions=torch.cat([*positions, padding]),
            slots=torch.cat(slots),
            live=first,
            segments=segments,
            wanted=torch.tensor(wanted, dtype=torch.int64),
            starts=starts,
        )


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

    def segment(self, first: int, group: int, window: int | None) -> Segment:
        part, size = self.part, self.part.table.pool.page_size
        full = part.base // size
        blocks = -(-(part.base + self.depth) // size)
        resident = -(-self.reach // size) * size
        run = part.table.run
        hidden, columns = self._chain_tail(full, blocks), None
        if part.words is not None:
            hidden, columns = self._tree_tail(full * size, blocks * size, resident)
        return Segment(
            rows=slice(first, first + self.count),
            page_size=size,
            blocks=blocks,
            full=full,
            used=self.reach,
            resident=resident,
            first_slot=run or 0,
            slots=None if run is not None else part.table.slots(0, resident),
            tail_mask=_stack_rows(hidden, group),
            window_mask=self._window(hidden, columns, full * size, group, window),
            path_columns=None if columns is None else _stack_rows(columns, group),
            tail_blocks=None if columns is None else self._tail_blocks(columns, hidden.shape[1], group),
        )

    def _chain_tail(self, full: int, blocks: int) -> Tensor:
        """bool[r, T*S]: a row of a chain hides every later position."""
        size = self.part.table.pool.page_size
        return torch.arange(full * size, blocks * size) > self.positions[:, None]

    def _tree_tail(self, begin: int, end: int, resident: int) -> tuple[Tensor, Tensor]:
        """bool[r, W] hidden slots, int64[r, T*S] columns: committed positions first, then the row's path in order.

        begin, end: positions of the tail. Behind a path that ends before them there is a slot that it does not hold.
        """
        assert self.part.words is not None
        committed, width = self.part.base - begin, resident - begin
        seen, columns = [], []
        for word in self.part.words:
            visible = word << committed | (1 << committed) - 1
            path = [column for column in range(visible.bit_length()) if visible >> column & 1]
            unseen = (~visible & visible + 1).bit_length() - 1
            seen.append([visible >> column & 1 for column in range(width)])
            columns.append(path + [unseen] * (end - begin - len(path)))
        return torch.tensor(seen) == 0, torch.tensor(columns)

    def _tail_blocks(self, columns: Tensor, width: int, group: int) -> Tensor | None:
        """fp32[T, M, W]: one for the slots of each block's positions."""
        by_block = columns.unflatten(-1, (-1, self.part.table.pool.page_size)).transpose(0, 1)
        if len(by_block) == 1:
            return None
        held = torch.zeros(len(by_block), self.count, width).scatter_(2, by_block, 1.0)
        return torch.stack([_stack_rows(block, group) for block in held])

    def _window(
        self, hidden: Tensor, columns: Tensor | None, begin: int, group: int, window: int | None
    ) -> Tensor | None:
        """bool[M, resident]: what the tail hides and what lies a window or more back; None if nothing does."""
        if window is None or self.part.base + self.depth <= window:
            return None
        positions = torch.arange(begin + hidden.shape[1]).repeat(self.count, 1)
        if columns is not None:
            behind_begin = torch.arange(begin, begin + columns.shape[1]).expand_as(columns)
            positions[:, begin:].scatter_(1, columns, behind_begin)
        behind = positions <= self.positions[:, None] - window
        behind[:, begin:] |= hidden
        return _stack_rows(behind, group)


def _stack_rows(rows: Tensor, group: int) -> Tensor:
    """[r, X] -> [M, X], M at least 8: each row once per query head of its kv head; padding repeats the last."""
    stacked = rows.repeat_interleave(group, dim=0)
    short = 8 - stacked.shape[0]
    return torch.cat((stacked, stacked[-1:].expand(short, -1))) if short > 0 else stacked
