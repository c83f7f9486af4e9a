"""How the host's inputs of captured work are sent before a replay: columns in one buffer, in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.kvpaging import WindowPages

#: The alignment of columns in bytes: GPU kernels are compiled for the alignment of their pointers.
_ALIGNED = 64

Column = tuple[Sequence[int], torch.dtype]


class Staged:
    """Columns, by name: ``arrays`` for the host, ``tensors`` for kernels.

    On a CPU both are the same memory. To a device they are sent in one copy, which may still be running when the host
    continues: so it only writes to what :meth:`writable` returns. advanced: further ones, which the device changes too.
    """

    def __init__(
        self, device: torch.device, columns: Mapping[str, Column], advanced: Mapping[str, Column] | None = None
    ) -> None:
        columns, last = {**columns, **(advanced or {})}, len(columns)
        begins, size = [], 0
        for shape, dtype in columns.values():
            begins.append(size)
            size += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        self._fixed = [*begins, size][last]
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._there = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
        self._event = None if device.type == "cpu" else torch.Event(device)
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, (shape, dtype)), begin in zip(columns.items(), begins, strict=True):
            end = begin + prod(shape) * dtype.itemsize
            host, there = (each[begin:end].view(dtype).view(*shape) for each in (self._host, self._there))
            self.arrays[name], self.tensors[name] = host.numpy(), there

    def writable(self) -> dict[str, NDArray[Any]]:
        """``arrays``, after the last copy has finished."""
        if self._event is not None:
            self._event.synchronize()
        return self.arrays

    def send(self, advanced: bool = True) -> None:
        """Send what was written, for whatever is launched next. advanced: also those that the device changes."""
        if self._event is not None:
            end = len(self._host) if advanced else self._fixed
            self._there[:end].copy_(self._host[:end], non_blocking=True)
            self._event.record()


class PageTables:
    """The columns ``tables`` of a batch, int32[S, P], and ``window_tables`` if there are window pages.

    Entries after the pages of a text are 0: what a pass writes there, in rows of padding, goes to the padding page.
    """

    def __init__(self, staged: Staged, windows: WindowPages | None) -> None:
        self._staged, self._windows = staged, windows
        sequences, self._width = staged.arrays["tables"].shape
        self._known = [list[int]() for _ in range(sequences)]

    def write(self, index: int, pages: list[int], length: int) -> bool:
        """Write the page ids of a sequence, of which only the first P matter; returns whether any changed. length: at
        least how many tokens its text has."""
        changed, windows = self._known[index] != pages, self._windows
        if changed:
            before, pages = len(self._known[index]), pages[: self._width]
            self._known[index], row = pages, self._staged.writable()["tables"][index]
            row[: len(pages)], row[len(pages) : before] = pages, 0
        if windows is None:
            return changed
        return self._write_window(index, pages[: self._width], windows, windows.first_page(length)) or changed

    def _write_window(self, index: int, pages: list[int], windows: WindowPages, first: int) -> bool:
        """The same for window pages, from the first that is attended to."""
        begin, found = first if pages else 0, windows.page_map[pages[first:]]
        row = self._staged.arrays["window_tables"][index, begin:]
        own = np.zeros_like(row)
        own[: len(found)] = found
        if np.array_equal(row, own):
            return False
        self._staged.writable()["window_tables"][index, begin:] = own
        return True
