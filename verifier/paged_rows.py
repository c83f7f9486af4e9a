"""The rows of a pass as static tensors: what a captured step fills on the device, and an eager pass from the host.

The CPU's own passes read a :class:`~verifier.batch.ForwardBatch`, which knows on the host where everything is. On a GPU
lengths and tables are tensors, so that the same pass can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spec.features import Features
from spec.protocols import Rows
from spec.tree import MAX_NODES
from verifier.ops.tree_attention import PagedRows


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend alike: all are nodes of trees (or short chains), or all are long stretches of text."""

    rows: slice
    paged: PagedRows


@dataclass(frozen=True, slots=True)
class StaticRows:
    """R rows, at least two; those from ``live`` on are padding, at position 0 of the padding page.

    tokens, positions, slots: int64[R]. groups: in order, all live rows; padding belongs to the last. wanted: int64[W],
    the rows whose logits are needed; None for all live ones. starts: where each sequence's are among them. order:
    int64[live], where the sequences' rows are, if texts and trees are mixed and so not in order.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: tuple[Group, ...]
    live: int
    wanted: Tensor | None = None
    starts: tuple[int, ...] = ()
    order: Tensor | None = None

    @classmethod
    def of(cls, rows: Many[Rows], device: torch.device) -> StaticRows:
        """From the host's description. Short stretches are laid out as chains, so that they are read like trees."""
        order = sorted(range(len(rows)), key=lambda index: _is_text(rows[index]))
        parts = [_Part.of(rows[index]) for index in order]
        first = dict(zip(order, accumulate([part.count for part in parts], initial=0), strict=False))
        live = sum(part.count for part in parts)
        padding = torch.zeros(max(0, 2 - live), dtype=torch.int64)
        wanted, starts = _wanted(rows, first)
        return cls(
            tokens=torch.cat([*(part.tokens for part in parts), padding]).to(device),
            positions=torch.cat([*(part.positions for part in parts), padding]).to(device),
            slots=torch.cat([*(part.slots for part in parts), padding]).to(device),
            groups=tuple(_groups(parts, live + len(padding), device)),
            live=live,
            wanted=torch.tensor(wanted, dtype=torch.int64).to(device),
            starts=tuple(starts),
            order=None if order == sorted(order) else _order(rows, first).to(device),
        )

    def in_order(self, features: Features) -> Features:
        """Rows of the pass, padding left out, in the order of the sequences they were made of."""
        if self.order is None:
            return {name: rows[: self.live] for name, rows in features.items()}
        return {name: rows[self.order] for name, rows in features.items()}

    def in_place(self, values: Tensor) -> Tensor:
        """[R, ..]: values of the sequences' rows, [live, ..] in the order of the sequences, where the rows are."""
        placed = values.new_zeros(len(self.tokens), *values.shape[1:])
        placed[slice(self.live) if self.order is None else self.order] = values
        return placed


def _order(rows: Many[Rows], first: dict[int, int]) -> Tensor:
    return torch.cat([torch.arange(first[index], first[index] + len(part.tokens)) for index, part in enumerate(rows)])


def _wanted(rows: Many[Rows], first: dict[int, int]) -> tuple[list[int], list[int]]:
    """The rows whose logits are wanted, in order of the sequences, and where each sequence's begin."""
    wanted: list[int] = []
    starts = [0]
    for index, part in enumerate(rows):
        end = first[index] + len(part.tokens)
        wanted.extend(range({"all": first[index], "last": end - 1, "none": end}[part.wanted], end))
        starts.append(len(wanted))
    return wanted, starts


def _is_text(part: Rows) -> bool:
    """Whether a stretch has more rows than an ancestor word has bits."""
    return part.nodes is None and len(part.tokens) > MAX_NODES


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's rows. words, depths: of a tree or short chain, else None. length: what lies below all of them."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    pages: list[int]
    page_size: int
    length: int
    words: list[int] | None
    depths: list[int] | None

    @property
    def count(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, part: Rows) -> _Part:
        count, base, table = len(part.tokens), part.base, part.table
        words, nodes = part.words, part.nodes
        if words is None or nodes is None:
            words = None if _is_text(part) else [(2 << row) - 1 for row in range(count)]
            positions, slots = torch.arange(base, base + count), table.slots(base, base + count)
        else:
            positions = torch.tensor([base + word.bit_count() - 1 for word in words])
            slots = table.slots(base, base + max(word.bit_length() for word in words))[torch.tensor(list(nodes))]
        depths = None if words is None else [word.bit_count() - 1 for word in words]
        return cls(
            part.tokens,
            positions,
            slots,
            table.pages,
            table.pool.page_size,
            base,
            None if words is None else list(words),
            depths,
        )


def _groups(parts: Many[_Part], rows: int, device: torch.device) -> list[Group]:
    """Trees first, then texts; the last group takes the padding along."""
    groups = []
    begin = 0
    for text in (False, True):
        mine = [part for part in parts if (part.words is None) == text]
        if mine:
            end = begin + sum(part.count for part in mine)
            groups.append(Group(slice(begin, end), _paged(mine, device)))
            begin = end
    groups[-1] = Group(slice(groups[-1].rows.start, rows), _padded(groups[-1].paged, rows - begin))
    return groups


def _paged(parts: Many[_Part], device: torch.device) -> PagedRows:
    width = max(len(part.pages) for part in parts)
    tables = [[*part.pages, *[0] * (width - len(part.pages))] for part in parts]
    offsets = list(accumulate((part.count for part in parts), initial=0))

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    words = [word - (1 << 64) if word >> 63 else word for part in parts for word in part.words or ()]
    depths = [depth for part in parts for depth in part.depths or ()]
    return PagedRows(
        tables=torch.tensor(tables, dtype=torch.int32).to(device),
        page_size=parts[0].page_size,
        lengths=column([part.length for part in parts]),
        offsets=column(offsets),
        words=column(words, torch.int64) if words else None,
        depths=column(depths) if words else None,
    )


def _padded(paged: PagedRows, padding: int) -> PagedRows:
    """Room for padding rows in what is kept for each row."""
    if paged.words is not None and paged.depths is not None and padding:
        paged.words = torch.cat((paged.words, paged.words.new_zeros(padding)))
        paged.depths = torch.cat((paged.depths, paged.depths.new_zeros(padding)))
    return paged
