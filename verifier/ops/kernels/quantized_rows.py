"""Heads of keys and values in 8 bits and their scales: from fp32 and back, as :mod:`foresay.kvpaging.ops` has them.

The bits of fp8 (e4m3) are made of integers: so it is on every GPU, and in the interpreter. Kernels see them as uint8.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(numbers):
    """fp32, without loss."""
    if numbers.dtype == tl.int8:
        return numbers.to(tl.float32)
    word = numbers.to(tl.int32)
    # Exponents begin 120 lower: a product moves them, and makes denormals normal.
    return (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def scale_of(low, high, LARGEST: tl.constexpr):
    """fp32[M]: the scales of heads, fp32[M, C] twice. As integers sizes are in order too, NaN being the largest."""
    sizes = tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.div_rn(tl.max(sizes, axis=1).to(tl.float32, bitcast=True), LARGEST)


@triton.jit
def narrowed(values, scale, kind: tl.constexpr, LARGEST: tl.constexpr):
    """Numbers of ``kind``: [M, C]. values: fp32[M, C]. scale: fp32[M]."""
    value = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0)[:, None])
    value = tl.where(value > -LARGEST, value, -LARGEST)
    value = tl.where(value < LARGEST, value, LARGEST)
    if kind == tl.int8:  # where fp32 has no more digits than units, a sum is rounded, and that is in its last bits
        word = (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # The sum with 2^14 has the last digit where denormals have theirs.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        word = tl.where(size < (121 << 23), small, rounded) | ((bits >> 24) & 0x80)
    return word.to(kind)
