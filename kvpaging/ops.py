"""Writing, quantising and moving rows of keys and values. Torch on every device; the contract is what a kernel meets.

A quantised row has one scale for each of its heads: numbers and scales follow from the row's values alone, whatever is
stored beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What rows can be quantised to: the largest number of each type.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def store_rows(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: Tensor | None = None) -> None:
    """Write one layer's new rows into their slots, in place.

    keys, values: [slots, G, D], one layer of a store. slots: int64 [N], distinct but for padding rows, which all go to
    slots of page 0. k, v: [N, G, D], of the store's dtype, or of any if there are scales: fp32[slots, 2, G], of keys
    and of values.
    """
    for number, (part, rows) in enumerate(((keys, k), (values, v))):
        numbers = rows
        if scales is not None:
            numbers, own = quantized(rows, part.dtype)
            scales[:, number].index_copy_(0, slots, own)
        as_bytes(part).index_copy_(0, slots, as_bytes(numbers))


def quantized(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads as numbers of ``dtype`` times a scale, which brings a head's largest number to the type's largest.

    rows: [.., D]. Returns [.., D], and the scales, fp32[..]. Where a head holds what is not finite its scale is not.
    """
    wide, largest = rows.float(), LARGEST[dtype]
    scales = wide.abs().amax(-1) / largest
    found = wide / torch.where(scales > 0, scales, 1.0)[..., None]
    found = torch.where(found > -largest, found, -largest).clamp(max=largest)  # NaN too: the scale says it
    return (found.round() if dtype is torch.int8 else found).to(dtype), scales


def dequantized(numbers: Tensor, scales: Tensor) -> Tensor:
    """fp32[.., D]: what quantised heads stand for. numbers: [.., D]. scales: fp32[..]."""
    return numbers.float() * scales[..., None]


def as_bytes(rows: Tensor) -> Tensor:
    """The same memory, of a type that every op takes: few take numbers of 8 bits that have a point."""
    return rows.view(torch.int8) if rows.dtype.itemsize == 1 else rows


def move_rows(parts: tuple[Tensor, ...], source: Tensor, destination: Tensor) -> None:
    """Move rows between slots in every layer, in place: first all are read, then all are written.

    parts: of a store, [L, slots, ..] each. source, destination: int64 [N], destinations distinct. A destination may be
    another row's source, as it is when an accepted path 0, 2, 5 is moved down to 0, 1, 2.
    """
    if source.numel():
        for part in map(as_bytes, parts):
            part.index_copy_(1, destination, part.index_select(1, source))
