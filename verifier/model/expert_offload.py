"""Experts' weights in page-locked memory of the host, which a GPU's kernels read over PCIe as they read their own; a
table of embeddings per layer may be there too.

If the experts of some layers are there, those of all others are laid out by the same rule: some rows at a time, so that
a GPU that is nearly full does not need room for a second copy of a product.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from foresay.verifier.model.errors import WeightsError
from foresay.verifier.ops.kernels.blocked import FLOATS, BlockedWeight
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import Gate

#: Numbers that are laid out at a time: this takes up to 14 bytes for each.
_NUMBERS = 1 << 22


class _Pages(mmap.mmap):
    """Pages of this process alone, unlocked before they are returned to the system."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(count: int) -> Tensor:
    """uint8[count], page-locked: exactly so many bytes, where PyTorch's own allocator would round up to a power of two.

    Raises WeightsError if the system has no room for them, or the driver does not lock them.
    """
    fault = f"{count:,} bytes of the host's memory for weights cannot be"
    try:
        pages = _Pages(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WeightsError(f"{fault} allocated ({error.strerror})") from error
    pages.madvise(mmap.MADV_DONTFORK)  # after a fork, what is written would go to a copy that the GPU does not see
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if code := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), count, 0)):
        raise WeightsError(f"{fault} page-locked (CUDA error {code})")
    pages.address = memory.data_ptr()
    return memory


def lay_out_experts(
    weight: Tensor | QuantizedMatrix, bias: Tensor | None, gated: Gate, experts: int, device: torch.device
) -> BlockedWeight:
    """The experts' weight, [E * O, K], laid out for ``device``: in its memory if it is there, else in the host's."""
    away = weight.device != device
    if isinstance(weight, Tensor) and not away:
        return BlockedWeight.pack(weight, bias, gated, experts)
    rows = max(1, _NUMBERS // weight.shape[1])
    sizes, found, first = [min(rows, weight.shape[0] - at) for at in range(0, weight.shape[0], rows)], None, 0
    parts: Sequence[Tensor | QuantizedMatrix] = weight.split_with_sizes(sizes)
    for part, size in zip(parts, sizes, strict=True):
        one = BlockedWeight.pack(part)
        found = _empty(one, weight.shape[0], away) if found is None else found
        for into, made, axis in _tensors(found, one):
            into.narrow(axis, first, size).copy_(made)
        first += size
    assert found is not None, "experts have rows"
    return replace(found, bias=bias, gated=gated, experts=experts)


def _empty(one: BlockedWeight, outer: int, away: bool) -> BlockedWeight:
    """A weight like this one, with ``outer`` outputs."""
    made = dict[str, Tensor]()
    for name, tensor, axis in _named(one):
        shape = list(tensor.shape)
        shape[axis] = outer
        count = tensor.nbytes // tensor.shape[axis] * outer
        made[name] = page_locked(count).view(tensor.dtype).view(shape) if away else tensor.new_empty(shape)
    return replace(one, **made)  # type: ignore[arg-type]


def _tensors(into: BlockedWeight, one: BlockedWeight) -> list[tuple[Tensor, Tensor, int]]:
    return [(getattr(into, name), tensor, axis) for name, tensor, axis in _named(one)]


def _named(one: BlockedWeight) -> list[tuple[str, Tensor, int]]:
    """Its tensors, and which of their axes is that of outputs."""
    found = ((each.name, getattr(one, each.name)) for each in fields(one))
    of_values = 0 if one.kind == FLOATS else 1
    return [
        (name, each, of_values if name == "values" else each.dim() - 1)
        for name, each in found
        if isinstance(each, Tensor)
    ]
