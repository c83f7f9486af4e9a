"""Quantised matrices, with a scale for each group: their meaning, and conversion from others.

::

    values   [O, K]   8 bits: int8, or floats (e4m3); 4 bits: two in a byte, that of the even k in the low half
    scales   [O, G]   of the G groups of K / G numbers of a row, side by side; one group: a scale for each output
    zeros    [O, G]   int8: the zero points; None: all are 0

    weight[o, k] = (values[o, k] - zeros[o, g]) * scales[o, g]

If a quantiser used another order of a row's numbers (act-order), ``order`` gives the group g of each k.

GGUF's have scales of int8, which are multiples of steps, and perhaps minimums instead of zeros (or both are fp16 and
have no steps); values of four bits with minimums have no sign::

    minimums         [O, G]   int8; None: no minimums
    steps            [O, S]   fp16, of the S spans of K / S numbers of a row; None: scales are what they are
    minimum_steps    [O, S]   fp16

    weight[o, k] = values[o, k] * (scales[o, g] * steps[o, s]) - minimums[o, g] * minimum_steps[o, s]

Floats of four bits (e2m1: a sign, two bits of the exponent, one of the fraction) have scales of eight: powers of two
(e8m0, MXFP4) or e4m3 (NVFP4)::

    weight[o, k] = e2m1(values[o, k]) * scales[o, g]

NVFP4's of safetensors files have a step for each row, in fp32, as all rows of one tensor share it. With that a product
is rounded to bf16, as is done to write such a checkpoint out in bf16::

    weight[o, k] = bf16(e2m1(values[o, k]) * (scales[o, g] * steps[o, 0]))

Legend: O outer width, K inner width, G groups, S spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Floats of 8 bits: a sign, 4 of the exponent, 3 of the fraction; no infinities.
FP8 = torch.float8_e4m3fn
#: Only powers of two: an 8-bit exponent.
E8M0 = torch.float8_e8m0fnu
#: Floats of 4 bits by their codes, doubled.
DOUBLED_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
#: Rows that are converted at a time, so that intermediate results take little memory.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """See above. Parts of it are views. inner: K. order: int32[K], the group of each number of a row, shared by all
    parts;
    None: groups are contiguous."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    inner: int
    minimums: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def empty(
        cls,
        outer: int,
        inner: int,
        bits: int,
        group: int,
        symmetric: bool,
        scales: torch.dtype,
        device: torch.device,
        floats: bool = False,
    ) -> QuantizedMatrix:
        """One without data. group: numbers that share a scale. floats: whether values are floats."""
        packed = (outer, inner) if bits == 8 else (outer, inner // 2)
        kind = torch.uint8 if bits == 4 else FP8 if floats else torch.int8
        values = torch.empty(packed, dtype=kind, device=device)
        groups = (outer, inner // group)
        zeros = None if symmetric else torch.empty(groups, dtype=torch.int8, device=device)
        return cls(values, torch.empty(groups, dtype=scales, device=device), zeros, bits, inner)

    def with_steps(self, span: int, minimums: bool) -> QuantizedMatrix:
        """The same, without numbers, with scales that are multiples of steps. span: numbers that have a step
        together.
        """
        spans, device = (len(self.values), self.inner // span), self.device
        scales = self.scales if self.e2m1 else torch.empty(self.scales.shape, dtype=torch.int8, device=device)
        kind = torch.float32 if self.e2m1 else torch.float16
        steps = [torch.empty(spans, dtype=kind, device=device) for _ in range(1 + minimums)]
        if not minimums:
            return replace(self, scales=scales, steps=steps[0])
        return replace(self, scales=scales, minimums=torch.empty_like(scales), steps=steps[0], minimum_steps=steps[1])

    @classmethod
    def stacked(cls, parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
        """Several matrices of the same kind, stacked by rows."""
        tensors = zip(*(part._tensors for part in parts), strict=True)
        return parts[0]._with(None if each[0] is None else torch.cat(each) for each in tensors)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, K)."""
        return len(self.values), self.inner

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.values.device

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.inner // self.scales.shape[1]

    @property
    def span(self) -> int:
        """Numbers that share a step."""
        return self.inner // (self.scales if self.steps is None else self.steps).shape[1]

    @property
    def floats(self) -> bool:
        """Whether values are 8-bit floats."""
        return self.values.dtype is FP8

    @property
    def e2m1(self) -> bool:
        """Whether values are 4-bit floats."""
        return self.bits == 4 and self.scales.dtype in (E8M0, FP8)

    @property
    def signed(self) -> bool:
        """Whether values have a sign."""
        return self.bits == 8 or self.minimums is None

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.values, self.scales, self.zeros, self.minimums, self.steps, self.minimum_steps

    def _with(self, tensors: Iterable[Tensor | None]) -> QuantizedMatrix:
        values, scales, zeros, minimums, *steps = tensors
        assert values is not None and scales is not None, "every matrix has both"
        made = QuantizedMatrix(values, scales, zeros, self.bits, self.inner, minimums, *steps)
        return replace(made, order=self.order)

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        """The same on another device."""
        moved = self._with(None if one is None else one.to(device) for one in self._tensors)
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    def with_order(self) -> QuantizedMatrix:
        """The same, with a still unknown order of its numbers."""
        return replace(self, order=torch.full((self.inner,), -1, dtype=torch.int32, device=self.device))

    def side_by_side(self) -> tuple[QuantizedMatrix, Tensor | None]:
        """The same with contiguous groups, and the original index of each number of a row, int64[K]; None:
        unchanged."""
        if self.order is None or not (self.order.diff() < 0).any():
            return replace(self, order=None), None
        was = self.order.argsort(stable=True)
        values = self.numbers()[:, was]
        return replace(self, values=values if self.bits == 8 else packed(values), order=None), was

    def split_with_sizes(self, sizes: Sequence[int]) -> list[QuantizedMatrix]:
        """Split by rows."""
        split = ([None] * len(sizes) if one is None else one.split_with_sizes(list(sizes)) for one in self._tensors)
        return [self._with(each) for each in zip(*split, strict=True)]

    def __getitem__(self, rows: Tensor) -> QuantizedMatrix:
        """Some rows. rows: int64[N]."""
        return self._with(None if one is None else one[rows] for one in self._tensors)

    def numbers(self) -> Tensor:
        """int8 or e4m3 [O, K]: the values, one per byte; for e2m1 doubled."""
        if self.bits == 8:
            return self.values
        if self.e2m1:
            return self._doubled().to(torch.int8)
        return unpacked(self.values, self.signed)

    def codes(self) -> Tensor:
        """int8[O, K]: values of 4 bits as they are stored, from 0."""
        return unpacked(self.values, signed=False)

    def whole(self) -> QuantizedMatrix:
        """The same as integers: e2m1 values are doubled."""
        if not self.e2m1:
            return self
        return replace(self, values=self.numbers(), scales=self._halves(), bits=8, steps=None)

    def _doubled(self) -> Tensor:
        """fp32[O, K]: twice the values of e2m1."""
        table = torch.tensor(DOUBLED_E2M1, device=self.device)
        return table[self.codes().int()]

    def _halves(self) -> Tensor:
        """fp32[O, G]: half of their scales, times the row's step; exponent 255 is a number too, as in transformers."""
        found: Tensor = self.scales.float() * 0.5
        if self.scales.dtype is FP8:
            return found if self.steps is None else found * self.steps
        found = torch.pow(2.0, self.scales.view(torch.uint8).int() - 128)
        return found

    def plain(self) -> Tensor:
        """fp32[O, K]: the dequantised weight."""
        if self.e2m1:
            whole: Tensor = self._doubled().unflatten(1, (-1, self.group)) * self._halves().unsqueeze(2)
            return whole.flatten(1) if self.steps is None else whole.flatten(1).bfloat16().float()
        found, was = self.side_by_side()
        if was is not None:
            return found.plain()[:, was.argsort()]
        grouped: Tensor = self.numbers().float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            grouped = grouped - self.zeros.float().unsqueeze(2)
        scaled: Tensor = grouped * self._stepped(self.scales, self.steps).unsqueeze(2)
        if self.minimums is not None:
            scaled -= self._stepped(self.minimums, self.minimum_steps).unsqueeze(2)
        return scaled.flatten(1)

    def _stepped(self, multiples: Tensor, steps: Tensor | None) -> Tensor:
        """fp32[O, G]: scales or minimums."""
        if steps is None:
            return multiples.float()
        return multiples.float() * steps.float().repeat_interleave(multiples.shape[1] // steps.shape[1], dim=1)

    def take(self, found: QuantizedMatrix) -> None:
        """Copy another one, whose groups are whole ones of these, and whose values fit."""
        same = found.bits == self.bits and found.signed == self.signed
        self.values.copy_(found.values) if same else self.put(found.numbers())
        if self.steps is None:
            self.scales.copy_(found.scales)
            return
        scales, steps = found.scales, found.steps
        if steps is None:  # then the scales are steps themselves
            scales, steps = torch.ones_like(found.scales), found.scales
        _repeat(scales, self.scales)
        _repeat(steps, self.steps)
        for into, given in ((self.minimums, found.minimums), (self.minimum_steps, found.minimum_steps)):
            if into is not None:
                into.zero_() if given is None else _repeat(given, into)

    def fill(self, weight: Tensor) -> None:
        """Quantise a float weight [O, K] to the nearest values. Scales are rounded first, so that values compensate for
        it."""
        for part, rows in zip(self._in_pieces(), weight.split(_ROWS), strict=True):
            part._fill(rows.to(self.device).float().unflatten(1, (-1, self.group)))

    def _in_pieces(self) -> Iterator[QuantizedMatrix]:
        sizes = [len(part) for part in self.values.split(_ROWS)]
        yield from self.split_with_sizes(sizes)

    def _fill(self, grouped: Tensor) -> None:
        """grouped: fp32[O, G, K / G]."""
        most: float = torch.finfo(FP8).max if self.floats else (1 << (self.bits - 1)) - 1
        least = -most if self.floats else -most - 1
        if self.zeros is None:
            scales = grouped.abs().amax(2) / most
            zeros = torch.zeros_like(scales)
        else:  # zero is a value, so that zeros stay zero
            low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
            scales = (high - low) / (most - least)
        self.scales.copy_(torch.where(scales > 0, scales, 1.0))
        exact = self.scales.float()
        if self.zeros is not None:
            zeros = (least - low / exact).round().clamp(least, most)
            self.zeros.copy_(zeros)
        values = grouped / exact.unsqueeze(2)
        if not self.floats:  # else the type rounds
            values.round_().add_(zeros.unsqueeze(2))
        self.put(values.clamp_(least, most).flatten(1).to(FP8 if self.floats else torch.int8))

    def put(self, values: Tensor) -> None:
        """Set the values. values: int8 or e4m3 [O, K]."""
        self.values.copy_(values if self.bits == 8 else packed(values))


def _repeat(given: Tensor, into: Tensor) -> None:
    """The same numbers for smaller groups: [O, G] into [O, n G]."""
    into.copy_(given.repeat_interleave(into.shape[1] // given.shape[1], dim=1))


def packed(values: Tensor) -> Tensor:
    """uint8[O, K / 2] of int8[O, K] in four bits."""
    bits = values.view(torch.uint8)
    low, high = bits[:, ::2] & 15, bits[:, 1::2] << 4
    return low | high


def unpacked(values: Tensor, signed: bool = True) -> Tensor:
    """The reverse. signed: whether the upper of four bits is the sign."""
    if not signed:
        return torch.stack((values & 15, values >> 4), dim=-1).flatten(1).view(torch.int8)
    whole = values.view(torch.int8)
    return torch.stack(((whole << 4) >> 4, whole >> 4), dim=-1).flatten(1)
