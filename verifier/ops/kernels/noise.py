"""Gumbel noise made where it is needed: the integers of :mod:`foresay.spec.sample` bit for bit, its logarithms to an
ulp. See there for the numbers and why they are these."""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.spec.sample import hashed

#: Of int32s.
noise_bits = triton.jit(hashed)


@triton.jit
def mix64(value):
    """As :func:`foresay.spec.sampling.mix64`; value: uint64."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def noise_key(seed, position):
    """The key of one position, uint64. seed, position: int64, the seed's bits taken as unsigned."""
    return mix64(mix64(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))


@triton.jit
def gumbel_at(key, columns, token_ids, width):
    """fp32 standard Gumbel noise of the tokens in these columns of a row. key: of :func:`noise_key`. token_ids: see
    :func:`foresay.verifier.ops.sample.sample_rows`.

    ``log1p`` is Kahan's, since Triton has none that its interpreter runs: where ``1 - u`` rounds to 1, ``-log1p(-u)``
    is u itself; elsewhere the factor undoes the rounding of ``1 - u``.
    """
    ids = columns
    if token_ids is not None:
        ids = tl.load(token_ids + columns, columns < width, 0).to(tl.int32)
    bits = noise_bits(ids, key.to(tl.int32), (key >> 32).to(tl.int32))
    uniform = bits.to(tl.float32) * 4.656612873077393e-10
    uniform = tl.minimum(uniform + 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(exponential)
