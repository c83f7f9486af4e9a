"""Weights that fp16 holds, kept in it and multiplied in fp32: half the bytes of a step that reads every weight.

For a CPU that computes in fp32. bf16 has fewer digits than fp16, so of a checkpoint in either only what lies below
2^-17 may be rounded, by 2^-25 at most. FBGEMM multiplies, widening the weights as it goes. It takes rows in groups,
and on some processors its kernels for the smallest groups sum in another order than the others: which numbers of rows
agree (:mod:`verifier.model.rows`) is tried once, with one small weight, since its kernels know nothing of the width.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from verifier.model.rows import RowCounts, agreeing, random_rows

#: The most rows of one product, and of the trial.
_MOST = 256
#: Rows whose product is the measure of what a row's bits are: a group that every kind of processor has.
_GROUP = 6
#: Inner and outer width in the trial: sums longer than a block of the library's and odd, a full block of columns (16 or
#: 32) and a tail behind it.
_TRIED = (523, 56)
#: The library packs so many rows of a weight's columns together, and fills up the last of such blocks.
_BLOCK = 512
#: What rounding may change of a weight: half of fp16's smallest step, and of the largest weight so small a share that
#: matrices of tiny numbers, which would lose their digits, do not pass.
_ROUNDING, _SHARE = 2.0**-25, 2.0**-16


def holds(weight: Tensor) -> bool:
    """Whether fp16 holds every weight of an fp32 matrix, but for what is tiny beside the largest."""
    most = (weight.abs().amax() * _SHARE).clamp(max=_ROUNDING)
    return all(bool(((part.half().float() - part).abs() <= most).all()) for part in weight.split(1024))


def packed_bytes(inner: int, outer: int) -> int:
    """What a packed weight takes."""
    return 2 * outer * -(-inner // _BLOCK) * _BLOCK


class HalfWeight:
    """``x @ weight.T + bias`` of fp32 x [R, K] for one packed weight [O, K]; rows have the same bits in any company."""

    __slots__ = ("_packed",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[R, K] -> [R, O]."""
        counts = row_counts()
        assert counts is not None
        return counts.multiply(lambda part: _multiplied(part, self._packed), x)


def fitting(rows: int) -> int:
    """To how many rows that many are padded; above the largest product, what its parts come to."""
    counts = row_counts()
    assert counts is not None
    return counts.fitting(rows)


def usable() -> bool:
    """Whether this torch on this processor has such products, and rows of them agree."""
    return row_counts() is not None


@cache
def row_counts() -> RowCounts | None:
    """The numbers of rows that agree with groups of ``_GROUP``; None if none do.

    The ops are known to x86 alone, and private enough to torch to be looked for first.
    """
    inner, outer = _TRIED
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(random_rows(outer, inner), None)
        _multiplied(random_rows(1, inner), packed)
    except (AttributeError, RuntimeError):
        return None
    agreed = agreeing(lambda x: _multiplied(x, packed), random_rows(_MOST, inner), _GROUP, range(1, _MOST + 1))
    return RowCounts(agreed) if agreed else None


def _multiplied(x: Tensor, packed: object) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return product
