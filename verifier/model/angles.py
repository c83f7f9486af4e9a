"""Cosines and sines with the same bits on every machine (docs/same-tokens.md#portable-bits): torch's last digit depends
on the processor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Quarter turns in three parts, of which the first two have 33 bits: a product with a whole number below 2^20 is exact.
_QUARTERS = float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69")
#: Taylor coefficients in the square, from the highest power down, of sin(x) / x and of cos(x): enough for fp64 up to an
#: eighth of a turn.
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)]
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1)]
#: Rows of a table that are computed at once, so that they stay in a processor's cache.
_PIECE = 512


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of angles from 0 to 2^20, fp32, to the nearest fp32 but for few. A sum or a product of two
    fp64 has one result on every machine."""
    cos, sin = torch.empty_like(angles), torch.empty_like(angles)
    for at in range(0, len(angles), _PIECE):
        piece = slice(at, at + _PIECE)
        cos[piece], sin[piece] = _of_piece(angles[piece].double())
    return cos, sin


def _of_piece(angles: Tensor) -> tuple[Tensor, Tensor]:
    quarters = (angles * (2 / math.pi)).round_()
    for part in _QUARTERS:
        angles -= quarters * part  # which is what is left of a quarter turn
    square = angles * angles
    sin, cos = _series(_SIN, square).mul_(angles), _series(_COS, square)
    number = quarters.long()
    swapped = (number & 1).bool()
    signs = (1 - ((number + turned) & 2) for turned in (1, 0))  # of the cosine, and of the sine
    both = sin.where(swapped, cos), cos.where(swapped, sin)
    cos, sin = (value * sign for value, sign in zip(both, signs, strict=True))
    return cos, sin


def _series(coefficients: list[float], x: Tensor) -> Tensor:
    made = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        made.mul_(x).add_(coefficient)
    return made
