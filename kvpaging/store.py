"""One model's keys and values, in the pages of a pool.

    slot   page * page_size + offset                     mark[page]: leading rows of the page that are valid
    page   | valid valid valid  .  .  .  . |             here 3

Layers of the same shape share one array, so a model with uniform layers has a single one. If the pool has window pages,
sliding-window layers keep their rows in those (kvpaging/window.py), in other slots.

All stores attached to one pool are indexed by the same page ids, so one page table serves the target and its drafters.
A mark says how far this model has filled a page; rows after it are scratch, stale or never written. The target's rows
of a shared page never change. A drafter that paused may append after its own mark even in a shared page: what it writes
is a function of the text before, so it does not matter which sequence writes it.

Rows are written, quantised and moved by torch on every device: this is the reference for kernels. A quantised row has
one scale for each of its heads: numbers and scales depend only on the row's values, not on other stored rows.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foresay.kvpaging.pool import PagePool
from foresay.kvpaging.states import RecurrentShape, StatePages, StateStore
from foresay.kvpaging.table import PageTable
from foresay.kvpaging.verbs import RowPages, Store
from foresay.kvpaging.window import WindowPages

#: The types that rows can be quantised to, with the largest number of each.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def store_rows(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: Tensor | None = None) -> None:
    """Write one layer's new rows to their slots, in place.

    keys, values: [slots, G, D], one layer of a store. slots: int64 [N], distinct except for padding rows, which all go
    to slots of page 0. k, v: [N, G, D]; scales: fp32[slots, 2, G], of keys and of values, where they are quantised.
    """
    for number, (part, rows) in enumerate(((keys, k), (values, v))):
        numbers = rows.to(part.dtype) if scales is None else rows
        if scales is not None:
            numbers, own = quantized(rows, part.dtype)
            scales[:, number].index_copy_(0, slots, own)
        as_bytes(part).index_copy_(0, slots, as_bytes(numbers))


def quantized(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads as numbers of ``dtype`` times a scale, chosen so that a head's largest number becomes the type's largest.

    rows: [.., D]. Returns [.., D], and the scales, fp32[..]. The scale of a head with a non-finite number is not
    finite.
    """
    wide, largest = rows.float(), LARGEST[dtype]
    scales = wide.abs().amax(-1) / largest
    found = wide / torch.where(scales > 0, scales, 1.0)[..., None]
    found = torch.where(found > -largest, found, -largest).clamp(max=largest)  # NaN too: the scale has it
    return (found.round() if dtype is torch.int8 else found).to(dtype), scales


def dequantized(numbers: Tensor, scales: Tensor) -> Tensor:
    """fp32[.., D]: the values of quantised heads. numbers: [.., D]. scales: fp32[..]."""
    return numbers.float() * scales[..., None]


def as_bytes(rows: Tensor) -> Tensor:
    """The same memory as a type that every op supports: few support 8-bit floats."""
    return rows.view(torch.int8) if rows.dtype.itemsize == 1 else rows


def move_rows(parts: tuple[Tensor, ...], source: Tensor, destination: Tensor) -> None:
    """Move rows between slots in every layer, in place: all are read before any is written.

    parts: of a store, [L, slots, ..] each. source, destination: int64 [N], destinations distinct. A destination may be
    another row's source, as when an accepted path 0, 2, 5 is moved down to 0, 1, 2.
    """
    if source.numel():
        for part in map(as_bytes, parts):
            part.index_copy_(1, destination, part.index_select(1, source))


class LayerShape(Protocol):
    """What a layer keeps of a token: ``heads`` heads, each a key and a value of these widths; and what it attends
    to."""

    @property
    def heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def window(self) -> int | None:
        """How many positions a row attends to, including its own; None: all up to it."""
        ...

    @property
    def state(self) -> RecurrentShape | None:
        """What a recurrence of the layer keeps of a text; most such layers have no heads."""
        ...


@dataclass(frozen=True, slots=True)
class KVArrays:
    """Keys and values of the L layers of the same shape.

    keys, values: [L, num_pages * page_size, heads G, width D]; zeros at the start; padding rows go to page 0.
    scales: fp32[L, num_pages * page_size, 2, G], of the keys and of the values of each slot, where these are quantised
        (int8 or float8_e4m3fn); else None.
    pages: the kind of the pages that hold them.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None
    pages: RowPages

    @classmethod
    def zeros(cls, kind: _Widths, layers: int, dtype: torch.dtype, device: torch.device) -> KVArrays:
        """Arrays of zeros."""
        heads, *widths, pages = kind
        slots = pages.num_pages * pages.page_size
        keys, values = (_zeros((layers, slots, heads, width), dtype, device) for width in widths)
        scales = _zeros((layers, slots, 2, heads), torch.float32, device) if dtype in LARGEST else None
        return cls(keys, values, scales, pages)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All data of a slot, in every layer: [L, num_pages * page_size, ..] each."""
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of one of the layers."""
        return self.keys[index], self.values[index], None if self.scales is None else self.scales[index]

    def page(self, own: int) -> list[Tensor]:
        """The data of one of these pages: [L, page_size, ..] of each part that has any."""
        size = self.pages.page_size
        return [part[:, own * size : (own + 1) * size] for part in self.tensors if part.numel()]


class _Widths(NamedTuple):
    """What layers that share an array have in common."""

    heads: int
    key_dim: int
    value_dim: int
    pages: RowPages


class KVStore(Store):
    """Keys and values of one model, with a fill mark per page.

    layers: what each layer keeps, in order. A store of rows other than keys and values (features of a text) has them
        all in the keys, and values of width 0.
    arrays: of each shape, in the order in which the layers first have it; owned by this class.
    windows: the window pages of sliding-window layers; None: there are none, or they use the pool's pages.
    states: of recurrent layers, if there are any; in state pages of its own if given, else in the pool's.
    marks: for each page, how many of its leading rows are valid.
    """

    def __init__(
        self,
        pool: PagePool,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        states: StatePages | None = None,
    ) -> None:
        self.pool, self.layers, self.device = pool, tuple(layers), torch.device(device)
        self.windows = pool.find_store(WindowPages) if any(each.window is not None for each in layers) else None
        alike: dict[_Widths, list[int]] = {}
        for index, each in enumerate(layers):
            if not each.heads:
                continue
            pages = pool.rows if each.window is None else self.windows or pool.rows
            alike.setdefault(_Widths(each.heads, each.key_dim, each.value_dim, pages), []).append(index)
        self.arrays = tuple(KVArrays.zeros(kind, len(each), dtype, self.device) for kind, each in alike.items())
        where = zip(self.arrays, alike.values(), strict=True)
        self._where = {layer: (arrays, number) for arrays, each in where for number, layer in enumerate(each)}
        self.marks = [0] * pool.num_pages
        pool.attach(self)
        self.states = self._states(states or pool.find_store(StatePages))

    def _states(self, pages: StatePages | None) -> StateStore | None:
        kinds = [each.state for each in self.layers if each.state is not None]
        if not kinds:
            return None
        assert pages is not None, "there are state pages"
        store = StateStore(pages, kinds[0], len(kinds), lambda shape: _zeros(shape, torch.float32, self.device))
        self.pool.attach(store)
        return store

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All data of a slot, in every layer: [L, num_pages * page_size, ..] each."""
        return tuple(part for arrays in self.arrays for part in arrays.tensors)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of one layer."""
        arrays, number = self._where[index]
        return arrays.layer(number)

    def pages(self, index: int) -> RowPages:
        """The pages that hold a layer's rows."""
        return self._where[index][0].pages

    def clear(self, slots: Tensor) -> None:
        """Write zeros to these slots, in every layer."""
        for arrays in self.arrays:
            own = arrays.pages.slots(slots)
            for part in arrays.tensors:
                as_bytes(part)[:, own] = 0

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
        """Mark the rows of the first `length` tokens of the text as valid. Commit first: the text's length bounds the
        marks."""
        assert 0 <= length <= table.length, f"{length} rows marked, {table.length} tokens committed"
        pages, marks, size = table.pages, self.marks, self.pool.page_size
        full = table.full.get(self, 0)
        for index in range(full, self.pool.pages_for(length)):
            marks[pages[index]] = max(marks[pages[index]], min(size, length - index * size))
        table.full[self] = max(full, length // size)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Move rows between slots in every layer, as if simultaneously. Both int64 [N], on any device."""
        for arrays in self.arrays:
            move_rows(arrays.tensors, *(arrays.pages.slots(each).to(self.device) for each in (source, destination)))

    def rows(self, table: PageTable) -> list[Tensor]:
        """[T, L, ..] of each part: the text's rows, by position; zeros where a window has passed."""
        found, slots = [], table.slots(0, table.length)
        for arrays in self.arrays:
            own = arrays.pages.slots(slots).to(self.device)
            seen = arrays.pages.first_page(table.length) * self.pool.page_size
            for part in arrays.tensors:
                found.append(part[:, own].transpose(0, 1))
                as_bytes(found[-1])[:seen] = 0
        return found

    def parts(self, kind: Store, own: int) -> list[Tensor]:
        """What one page of a kind holds here: rows, [L, page_size, ..] of each part, or recurrent states."""
        rows = [part for arrays in self.arrays if arrays.pages is kind for part in arrays.page(own)]
        return rows if self.states is None else rows + self.states.parts(kind, own)

    def run(self, number: int, pages: int) -> list[Tensor]:
        """The memory of run ``number``, of ``pages`` pages, in each layer: [pages * page_size, ..] of each part."""
        size = pages * self.pool.page_size
        parts = [part for arrays in self.arrays if arrays.pages is self.pool.rows for part in arrays.tensors]
        return [layer[number * size :][:size] for part in parts for layer in part]

    def forget(self, page: int) -> None:
        """None of its rows are valid."""
        self.marks[page] = 0

    def clamp(self, page: int, rows: int) -> None:
        """Make at most the first `rows` rows of a page valid."""
        if self.marks[page] > rows:
            self.marks[page] = rows

    def copy(self, source: int, destination: int) -> None:
        """Copy a page's rows and its mark."""
        for arrays in self.arrays:
            pages = arrays.page(arrays.pages.local_page(source)), arrays.page(arrays.pages.local_page(destination))
            for rows, target in zip(*pages, strict=True):
                target.copy_(rows)
        self.marks[destination] = self.marks[source]


#: Makes Linux (5.14) clear pages of memory as if they were written to.
_POPULATE, _madvise = 23, getattr(ctypes.CDLL(None), "madvise", None)


def prefault(memory: Sequence[Tensor]) -> None:
    """Make the system clear untouched memory (:func:`_zeros`), if it supports that: else the first write waits for it,
    up to 5 ms for each huge page. For a background thread; data written meanwhile is kept."""
    for rows in memory:
        if _madvise is not None and rows.device.type == "cpu":
            before = rows.data_ptr() % mmap.PAGESIZE
            _madvise(ctypes.c_void_p(rows.data_ptr() - before), ctypes.c_size_t(rows.nbytes + before), _POPULATE)


#: The alignment of tensors that torch allocates, in bytes.
_ALIGNED = 64


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that the system maps lazily on a CPU, page by page when written to: clearing 1.4 GiB takes a second, and a
    short text needs little of it."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(size + _ALIGNED, np.uint8))
    start = -room.data_ptr() % _ALIGNED
    return room[start : start + size].view(dtype).view(shape)
