"""The noise made inside a kernel: the integers of spec/sample.py bit for bit, the logarithms to a rounding."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foresay.spec.sample import gumbel_row, noise_bits
from foresay.verifier.ops.kernels import candidates

pytestmark = pytest.mark.gpu
VOCAB = 70_001
# The last two hold a token of the smallest uniform numbers, where 1 - u is 1, and one of the largest.
KEYS = [(0, 0), (1, 5), (-1, 77), (2**63 - 1, 2**40), (-(2**63), 131_071), (0x9E3779B97F4A7C1, 3), (86, 9), (271, 9)]


@triton.jit
def write_row(seed, position, bits, values, vocab_size, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = candidates.noise_key(tl.load(seed), tl.load(position))
    tl.store(bits + ids, candidates.noise_bits(ids, key.to(tl.int32), (key >> 32).to(tl.int32)), ids < vocab_size)
    tl.store(values + ids, candidates.gumbel_at(key, ids, None, vocab_size), ids < vocab_size)


@pytest.mark.parametrize(("seed", "position"), KEYS)
def test_the_noise_of_a_position(seed, position, device) -> None:
    bits = torch.empty(VOCAB, dtype=torch.int32, device=device)
    values = torch.empty(VOCAB, device=device)
    key = torch.tensor([[seed], [position]], device=device)
    write_row[(triton.cdiv(VOCAB, 16384),)](key[0], key[1], bits, values, VOCAB, 16384)
    assert torch.equal(bits.cpu(), noise_bits(seed, position, VOCAB))
    wanted = gumbel_row(seed, position, VOCAB)
    assert torch.allclose(values.cpu(), wanted, rtol=3e-7, atol=3e-7)
