"""One model's keys and values, in the pages of a pool.

    slot   page * page_size + offset                     mark[page]: leading rows of the page that are valid
    page   | valid valid valid  .  .  .  . |             here 3

Layers that keep the same share one array, so a model whose layers are alike has a single one.

All stores attached to one pool are indexed by the same page ids, so one page table serves the target and its drafters.
A mark says how far this model has come in a page; rows behind it are scratch, stale or never written. The target's rows
of a shared page never change. A drafter that rested may append behind its own mark even in a shared page: what it
writes is a function of the text before, so it does not matter which sequence writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foresay.kvpaging.ops import LARGEST, as_bytes, move_rows
from foresay.kvpaging.pool import PADDING_PAGE, PagePool
from foresay.kvpaging.table import PageTable


class Shape(Protocol):
    """What a layer keeps of a token: so many heads, each a key and a value of these widths."""

    @property
    def heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVArrays:
    """Keys and values of the layers L that keep the same.

    keys, values: [L, num_pages * page_size, heads G, width D]; zeros at the start, and page 0 is where padding rows go.
    scales: fp32[L, num_pages * page_size, 2, G], of the keys and of the values of each slot, where these are quantised
        (int8 or float8_e4m3fn); else None.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None

    @classmethod
    def zeros(cls, shape: Shape, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVArrays:
        """Empty ones."""
        rows = (layers, slots, shape.heads)
        keys, values = (_zeros((*rows, width), dtype, device) for width in (shape.key_dim, shape.value_dim))
        scales = _zeros((layers, slots, 2, shape.heads), torch.float32, device) if dtype in LARGEST else None
        return cls(keys, values, scales)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that a slot has, in every layer: [L, num_pages * page_size, ..] each."""
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of one of the layers."""
        return self.keys[index], self.values[index], None if self.scales is None else self.scales[index]


class KVStore:
    """Keys and values of one model, with a fill mark per page.

    layers: what each layer keeps, in order. A store of rows that are no keys and values (features of a text) has them
        all in the keys, and values of width 0.
    arrays: of each shape, in the order in which the layers first have it; owned by this class.
    marks: for each page, how many of its leading rows are valid.
    """

    def __init__(
        self, pool: PagePool, layers: Sequence[Shape], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.pool, self.layers, self.device = pool, tuple(layers), torch.device(device)
        alike = {
            shape: [index for index, each in enumerate(layers) if each == shape] for shape in dict.fromkeys(layers)
        }
        slots = pool.num_pages * pool.page_size
        self.arrays = tuple(
            KVArrays.zeros(shape, len(each), slots, dtype, self.device) for shape, each in alike.items()
        )
        where = zip(self.arrays, alike.values(), strict=True)
        self._where = {layer: (arrays, place) for arrays, each in where for place, layer in enumerate(each)}
        self.marks = [0] * pool.num_pages
        pool.attach(self)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that a slot has, in every layer: [L, num_pages * page_size, ..] each."""
        return tuple(part for arrays in self.arrays for part in arrays.parts)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of one layer."""
        arrays, place = self._where[index]
        return arrays.layer(place)

    def clear(self, slots: Tensor) -> None:
        """Zeros in these slots, in every layer."""
        for part in self.parts:
            as_bytes(part)[:, slots] = 0

    def filled(self, table: PageTable) -> int:
        """How many leading tokens of the text have valid rows here; at most `table.length`."""
        pages, marks, size = table.pages, self.marks, self.pool.page_size
        whole = table.length // size
        full = table.full.get(self, 0)
        while full < whole and marks[pages[full]] == size:
            full += 1
        table.full[self] = full
        rest = marks[pages[full]] if full * size < table.length else 0
        return min(full * size + rest, table.length)

    def mark(self, table: PageTable, length: int) -> None:
        """Declare the rows of the first `length` tokens of the text valid. Commit first: the text bounds the marks."""
        assert 0 <= length <= table.length, f"{length} rows marked, {table.length} tokens committed"
        pages, marks, size = table.pages, self.marks, self.pool.page_size
        full = table.full.get(self, 0)
        for index in range(full, self.pool.pages_for(length)):
            marks[pages[index]] = max(marks[pages[index]], min(size, length - index * size))
        table.full[self] = max(full, length // size)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Move rows between slots in every layer, as if at once. Both int64 [N], on any device."""
        move_rows(self.parts, source.to(self.device), destination.to(self.device))

    def reset(self, page: int) -> None:
        """Start a page's new life: none of its rows are valid."""
        self.marks[page] = 0

    def clamp(self, page: int, rows: int) -> None:
        """Let at most the first `rows` rows of a page count as valid."""
        if self.marks[page] > rows:
            self.marks[page] = rows

    def copy(self, source: int, destination: int) -> None:
        """Copy a page's rows and its mark."""
        size = self.pool.page_size
        rows, target = slice(source * size, (source + 1) * size), slice(destination * size, (destination + 1) * size)
        for part in self.parts:
            part[:, target] = part[:, rows]
        self.marks[destination] = self.marks[source]

    def poison(self) -> None:
        """For tests: NaN in every row nobody may read (a quantised one's scales), that is all but page 0 and the marked
        rows of used pages.
        """
        used = [mark if self.pool.references(page) else 0 for page, mark in enumerate(self.marks)]
        used[PADDING_PAGE] = self.pool.page_size
        marks = torch.tensor(used, device=self.device)
        unread = torch.arange(self.pool.page_size, device=self.device) >= marks[:, None]
        rows = unread.flatten().nonzero()[:, 0]
        for arrays in self.arrays:
            for part in arrays.parts if arrays.scales is None else (arrays.scales,):
                part.index_fill_(1, rows, torch.nan)


#: Bytes that a tensor of torch's own is aligned to.
_ALIGNED = 64


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that a CPU gets from the system page by page, as they are written to: clearing 1.4 GiB takes a second, and
    a short text never comes so far."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(size + _ALIGNED, np.uint8))
    start = -room.data_ptr() % _ALIGNED
    return room[start : start + size].view(dtype).view(shape)
