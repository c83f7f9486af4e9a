"""The rows of a pass as static tensors: what a captured step fills on the device, and other passes from the host.

Lengths and tables are tensors, so that the same pass can be captured or recorded once and replayed. A GPU takes trees
and texts in groups, each with a kernel of its own; a CPU takes all rows as they come.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spec.features import Features
from spec.protocols import Rows
from spec.tree import MAX_NODES
from verifier.ops.tree_attention import PagedRows
from verifier.staged import Column, Staged

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend alike: all are nodes of trees (or short chains), or all are long stretches of text."""

    rows: slice
    paged: PagedRows


@dataclass(frozen=True, slots=True)
class StaticRows:
    """R rows; those from ``live`` on are padding, at position 0 of the padding page.

    tokens, positions, slots: int64[R]. groups: in order, all live rows; padding belongs to the last. wanted: int64[W],
    the rows whose logits are needed; None for all live ones. starts: where each sequence's are among them. order:
    int64[live], where the sequences' rows are, if texts and trees are mixed and so not in order. count, wanted_count:
    int64[1], of how many rows, and of how many wanted ones, where that is known when the pass runs; None: of all.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: tuple[Group, ...]
    live: int
    wanted: Tensor | None = None
    starts: tuple[int, ...] = ()
    order: Tensor | None = None
    count: Tensor | None = None
    wanted_count: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Rows], device: torch.device) -> StaticRows:
        """From the host's description, for a pass that is run at once."""
        if device.type == "cpu":
            written = WrittenRows(Sizes.of(rows), rows[0].table.pool.page_size)
            return written.laid_out(exactly=True, starts=written.write(rows))
        return cls._grouped(rows, device)

    @classmethod
    def _grouped(cls, rows: Sequence[Rows], device: torch.device) -> StaticRows:
        """Short stretches are laid out as chains, so that they are read like trees."""
        order = sorted(range(len(rows)), key=lambda index: is_text(rows[index]))
        parts = [_Part.of(rows[index]) for index in order]
        first = dict(zip(order, accumulate([part.count for part in parts], initial=0), strict=False))
        wanted, starts = _wanted(rows, first)
        return cls(
            tokens=torch.cat([part.tokens for part in parts]).to(device),
            positions=torch.cat([part.positions for part in parts]).to(device),
            slots=torch.cat([part.slots for part in parts]).to(device),
            groups=tuple(_groups(parts, device)),
            live=sum(part.count for part in parts),
            wanted=torch.tensor(wanted, dtype=torch.int64).to(device),
            starts=tuple(starts),
            order=None if order == sorted(order) else _order(rows, first).to(device),
        )

    def in_order(self, features: Features) -> Features:
        """Rows of the pass in the order of the sequences they were made of."""
        if self.order is None:
            return features
        return {name: rows[self.order] for name, rows in features.items()}

    def in_place(self, values: Tensor) -> Tensor:
        """[R, ..]: values of the sequences' rows, [live, ..] in the order of the sequences, where the rows are."""
        if self.order is None:
            return values
        placed = torch.empty_like(values)
        placed[self.order] = values
        return placed


def _order(rows: Sequence[Rows], first: dict[int, int]) -> Tensor:
    return torch.cat([torch.arange(first[index], first[index] + len(part.tokens)) for index, part in enumerate(rows)])


def _wanted(rows: Sequence[Rows], first: dict[int, int]) -> tuple[list[int], list[int]]:
    """The rows whose logits are wanted, in order of the sequences, and where each sequence's begin."""
    wanted: list[int] = []
    starts = [0]
    for index, part in enumerate(rows):
        end = first[index] + len(part.tokens)
        wanted.extend(range({"all": first[index], "last": end - 1, "none": end}[part.wanted], end))
        starts.append(len(wanted))
    return wanted, starts


def is_text(part: Rows) -> bool:
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
            words = None if is_text(part) else [(2 << row) - 1 for row in range(count)]
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


def _groups(parts: Sequence[_Part], device: torch.device) -> list[Group]:
    """Trees first, then texts."""
    groups = []
    begin = 0
    for text in (False, True):
        mine = [part for part in parts if (part.words is None) == text]
        if mine:
            end = begin + sum(part.count for part in mine)
            groups.append(Group(slice(begin, end), _paged(mine, device)))
            begin = end
    return groups


def _paged(parts: Sequence[_Part], device: torch.device) -> PagedRows:
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


class Sizes(NamedTuple):
    """Room for so many rows, sequences, pages of a table and wanted rows."""

    rows: int
    sequences: int
    pages: int
    wanted: int

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> Sizes:
        """Just what these need."""
        wanted = sum({"all": len(part.tokens), "last": 1, "none": 0}[part.wanted] for part in rows)
        pages = max(len(part.table.pages) for part in rows)
        return cls(sum(len(part.tokens) for part in rows), len(rows), pages, wanted)

    def holds(self, other: Sizes) -> bool:
        """Whether there is room for the other's."""
        return all(map(operator.ge, self, other))

    def grown(self, other: Sizes) -> Sizes:
        """Room for both and for some more: powers of two."""
        return Sizes(*(1 << (max(pair) - 1).bit_length() if max(pair) else 0 for pair in zip(self, other, strict=True)))


class WrittenRows:
    """Tensors that the host writes before a pass; rows of all kinds, in the order in which they are given.

    A CPU's kernels find positions and slots themselves, and read how many rows there are. On a device the host writes
    where each row is; what is behind the last is padding, and no stretch is longer than a tree.
    """

    def __init__(self, sizes: Sizes, page_size: int, device: torch.device = _CPU) -> None:
        self.sizes, self._size, self._finds = sizes, page_size, device.type == "cpu"
        rows, sequences = (sizes.rows,), (sizes.sequences,)
        columns: dict[str, Column] = {
            "tokens": (rows, torch.int64), "words": (rows, torch.int64), "wanted": ((sizes.wanted,), torch.int64),
            "counts": ((3,), torch.int64), "lengths": (sequences, torch.int32), "texts": (sequences, torch.int32),
            "offsets": ((sizes.sequences + 1,), torch.int32), "tables": ((sizes.sequences, sizes.pages), torch.int32),
        }  # fmt: skip
        if not self._finds:
            columns |= {"depths": (rows, torch.int32), "positions": (rows, torch.int64), "slots": (rows, torch.int64)}
        self._staged = Staged(device, columns)
        self._pages = [list[int]() for _ in range(sizes.sequences)]

    def laid_out(self, exactly: bool = False, starts: tuple[int, ...] = ()) -> StaticRows:
        """As a pass reads them. exactly: they are written, and just as many as there is room for."""
        there, live = self._staged.tensors, self.sizes.rows
        paged = PagedRows(there["tables"], self._size, there["lengths"], there["offsets"], there["words"])
        groups = (Group(slice(0, live), paged),)
        if not self._finds:
            paged.depths = there["depths"]
            return StaticRows(there["tokens"], there["positions"], there["slots"], groups, live, there["wanted"])
        rows, wanted, sequences = (None, None, None) if exactly else there["counts"].split(1)
        paged.texts, paged.sequences = there["texts"], sequences
        places = paged.found(live, rows)
        return StaticRows(
            there["tokens"], places.positions, places.own, groups, live, there["wanted"], starts,
            count=rows, wanted_count=wanted,
        )  # fmt: skip

    def write(self, rows: Sequence[Rows]) -> tuple[int, ...]:
        """Write what a pass reads; returns where the wanted rows of each sequence begin."""
        to = self._staged.arrays
        row, starts = 0, [0]
        for index, part in enumerate(rows):
            end = row + len(part.tokens)
            to["tokens"][row:end] = part.tokens.numpy()
            to["lengths"][index], to["offsets"][index + 1], to["texts"][index] = part.base, end, part.words is None
            if not self._finds:
                self._write_places(slice(row, end), part)
            elif part.words is not None:
                to["words"][row:end] = _signed(part.words)
            self._write_pages(index, part.table.pages)
            first = {"all": row, "last": end - 1, "none": end}[part.wanted]
            starts.append(starts[-1] + end - first)
            to["wanted"][starts[-2] : starts[-1]] = range(first, end)
            row = end
        to["counts"][:] = row, starts[-1], len(rows)
        if not self._finds:
            self._pad(row, len(rows), starts[-1])
            self._staged.send()
        return tuple(starts)

    def _write_places(self, at: slice, part: Rows) -> None:
        """Where the rows of a tree or a short chain are."""
        to, found = self._staged.arrays, _Part.of(part)
        assert found.words is not None and found.depths is not None, "texts are run op by op"
        to["words"][at], to["depths"][at] = _signed(found.words), found.depths
        to["positions"][at], to["slots"][at] = found.positions.numpy(), found.slots.numpy()

    def _pad(self, rows: int, sequences: int, wanted: int) -> None:
        """What is behind the last of each."""
        to = self._staged.arrays
        to["offsets"][sequences + 1 :] = rows
        for name, first in {"tokens": rows, "positions": rows, "slots": rows, "wanted": wanted}.items():
            to[name][first:] = 0

    def _write_pages(self, index: int, pages: list[int]) -> None:
        if self._pages[index] != pages:
            self._pages[index] = list(pages)
            self._staged.arrays["tables"][index, : len(pages)] = pages


def _signed(words: Sequence[int]) -> NDArray[np.int64]:
    """Words of 64 bits, as a tensor has them."""
    return np.array([word & _WORD for word in words], dtype=np.uint64).view(np.int64)


_WORD = (1 << 64) - 1
