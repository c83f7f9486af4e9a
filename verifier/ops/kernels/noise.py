"""Gumbel noise made where it is needed: the integers of :mod:`foresay.spec.noise` bit for bit, its logarithms to an
ulp.

Everything here is called from inside a kernel. See spec/noise.py for the numbers and why they are these.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix64(value):
    """As :func:`foresay.spec.seeds.mix64`; value: uint64."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def noise_key(seed, position):
    """The key of one position, uint64. seed, position: int64, the seed's bits taken as unsigned."""
    return mix64(mix64(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))


@triton.jit
def noise_bits(key, ids):
    """31 random bits per token, uint32. key: of :func:`noise_key`. ids: int32."""
    x = ids.to(tl.uint32, bitcast=True) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA77
    x = (x ^ (x >> 13)) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    x *= 0xC2B2AE3D
    x = (x ^ (x >> 16)) + (key >> 32).to(tl.uint32)
    x *= 0x27D4EB2F
    x = (x ^ (x >> 15)) * 0x165667B1
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@triton.jit
def gumbel(key, ids):
    """fp32 standard Gumbel noise of the tokens. ``log1p`` is Kahan's, since Triton has none that its interpreter runs.

    Where ``1 - u`` rounds to 1, ``-log1p(-u)`` is u itself; elsewhere the factor undoes the rounding of ``1 - u``.
    """
    uniform = noise_bits(key, ids).to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10
    uniform = tl.minimum(uniform + 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(exponential)


@triton.jit
def gumbel_at(key, columns, token_ids, width):
    """The noise of the tokens in these columns of a row. token_ids: as :func:`foresay.verifier.ops.sample.sample_rows`
    has them."""
    ids = columns
    if token_ids is not None:
        ids = tl.load(token_ids + columns, columns < width, 0).to(tl.int32)
    return gumbel(key, ids)
