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

    On a CPU both are the same memory. What a device reads is sent there in one copy; whoever writes again has waited
    for what was replayed since.
    """

    def __init__(self, device: torch.device, columns: Mapping[str, Column]) -> None:
        begins, size = [], 0
        for shape, dtype in columns.values():
            begins.append(size)
            size += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, (shape, dtype)), begin in zip(columns.items(), begins, strict=True):
            end = begin + prod(shape) * dtype.itemsize
            host, there = (each[begin:end].view(dtype).view(*shape) for each in (self._host, self._there))
            self.arrays[name], self.tensors[name] = host.numpy(), there

    def send(self) -> None:
        """What was written is there for whatever is launched next."""
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
