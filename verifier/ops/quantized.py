"""Matrices of whole numbers, each group of which has a scale: what they mean, and how they are made of others.

::

    values   [O, K]   8 bits: int8; 4 bits: two in a byte, that of the even k in the low half
    scales   [O, G]   of the G groups of K / G numbers of a row, side by side; one group: a scale for each output
    zeros    [O, G]   int8: the value that means zero; None: 0 means it everywhere

    weight[o, k] = (values[o, k] - zeros[o, g]) * scales[o, g]

Legend: O outer width, K inner width, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Rows that are worked on at a time: what is widened on the way takes little room.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """See above. Parts of it are views. inner: K."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    inner: int

    @classmethod
    def empty(
        cls, outer: int, inner: int, bits: int, group: int, symmetric: bool, scales: torch.dtype, device: torch.device
    ) -> QuantizedMatrix:
        """One without numbers. group: numbers that have a scale together."""
        packed = (outer, inner) if bits == 8 else (outer, inner // 2)
        values = torch.empty(packed, dtype=torch.int8 if bits == 8 else torch.uint8, device=device)
        groups = (outer, inner // group)
        zeros = None if symmetric else torch.empty(groups, dtype=torch.int8, device=device)
        return cls(values, torch.empty(groups, dtype=scales, device=device), zeros, bits, inner)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, K)."""
        return len(self.values), self.inner

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def group(self) -> int:
        """Numbers that have a scale together."""
        return self.inner // self.scales.shape[1]

    def split_with_sizes(self, sizes: Sequence[int]) -> list[QuantizedMatrix]:
        """So many rows each."""
        tensors = (self.values, self.scales, self.zeros)
        parts = ([None] * len(sizes) if one is None else one.split_with_sizes(list(sizes)) for one in tensors)
        return [replace(self, values=v, scales=s, zeros=z) for v, s, z in zip(*parts, strict=True)]

    def __getitem__(self, rows: Tensor) -> QuantizedMatrix:
        """Some rows. rows: int64[N]."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], zeros=zeros)

    def numbers(self) -> Tensor:
        """int8[O, K]: the values, one in a byte."""
        if self.bits == 8:
            return self.values
        return unpacked(self.values)

    def plain(self) -> Tensor:
        """fp32[O, K]: the weight that it stands for."""
        grouped: Tensor = self.numbers().float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            grouped = grouped - self.zeros.float().unsqueeze(2)
        scaled: Tensor = grouped * self.scales.float().unsqueeze(2)
        return scaled.flatten(1)

    def fill(self, weight: Tensor) -> None:
        """Take on the nearest values of a weight [O, K] of floats. Scales are rounded first, so that values make up
        for it."""
        for part, rows in zip(self._in_pieces(), weight.split(_ROWS), strict=True):
            part._fill(rows.float().unflatten(1, (-1, self.group)))

    def _in_pieces(self) -> Iterator[QuantizedMatrix]:
        sizes = [len(part) for part in self.values.split(_ROWS)]
        yield from self.split_with_sizes(sizes)

    def _fill(self, grouped: Tensor) -> None:
        """grouped: fp32[O, G, K / G]."""
        least, most = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if self.zeros is None:
            scales = grouped.abs().amax(2) / most
            zeros = torch.zeros_like(scales)
        else:  # zero itself is a value, so that what is zero stays it
            low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
            scales = (high - low) / (most - least)
        self.scales.copy_(torch.where(scales > 0, scales, 1.0))
        exact = self.scales.float()
        if self.zeros is not None:
            zeros = (least - low / exact).round().clamp(least, most)
            self.zeros.copy_(zeros)
        values = (grouped / exact.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(least, most)
        self.put(values.flatten(1).to(torch.int8))

    def put(self, values: Tensor) -> None:
        """Take on these values. values: int8[O, K]."""
        self.values.copy_(values if self.bits == 8 else packed(values))


def packed(values: Tensor) -> Tensor:
    """uint8[O, K / 2] of int8[O, K] in four bits."""
    bits = values.view(torch.uint8)
    low, high = bits[:, ::2] & 15, bits[:, 1::2] << 4
    return low | high


def unpacked(values: Tensor) -> Tensor:
    """The reverse."""
    signed = values.view(torch.int8)
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1).flatten(1)
