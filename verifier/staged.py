"""Tensors that the host writes before work that reads them is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

#: Bytes that a column begins at a multiple of: kernels of a GPU are compiled for how their pointers are aligned.
_ALIGNED = 64

Column = tuple[Sequence[int], torch.dtype]


class Staged:
    """Columns, by name: ``arrays`` are the host's, ``tensors`` what kernels read.

    On a CPU both are the same memory. What a device reads is sent there in one copy, which may still be under way when
    the host goes on: it writes again only what :meth:`writable` returns.
    """

    def __init__(self, device: torch.device, columns: Mapping[str, Column]) -> None:
        begins, size = [], 0
        for shape, dtype in columns.values():
            begins.append(size)
            size += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
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
        """``arrays``, once what was sent last has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self.arrays

    def send(self) -> None:
        """What was written is there for whatever is launched next."""
        if self._event is not None:
            self._there.copy_(self._host, non_blocking=True)
            self._event.record()
