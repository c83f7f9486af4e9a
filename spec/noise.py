"""Position-keyed Gumbel noise: the shared randomness of drafting and verifying.

The noise added to the logits at one absolute position is a function of (request seed, position, token id) alone:
never of the batch, the step, the tree or the drafter. So the token sampled at a position is the same however many
positions one forward pass computes, which is promise 1 at temperature above 0. See docs/same-tokens.md.

The hash is a 32-bit integer mix (multiply, xor-shift), the same in torch and in a Triton kernel, bit for bit. Its
low 31 bits make a uniform number whose fine end is at 0, where the winners of the exponential race are:
``E = -log1p(-u)``, ``G = -log(E)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foresay.spec.seeds import mix64

_MASK64 = (1 << 64) - 1
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def _signed(word: int) -> int:
    """A 32-bit word as the int32 that has the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift_xor(x: Tensor, shift: int) -> Tensor:
    """``x ^= x >>> shift`` in place; torch's ``>>`` keeps the sign, hence the mask."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


@lru_cache(maxsize=8)
def _scrambled_ids(vocab_size: int) -> Tensor:
    """int32[V]: the token ids, mixed once, so that neighbouring ids are far apart before the key goes in."""
    x = torch.arange(vocab_size, dtype=torch.int32)
    x.mul_(_signed(0x9E3779B1))
    _shift_xor(x, 15)
    x.mul_(_signed(0x85EBCA77))
    return _shift_xor(x, 13)


def noise_bits(seed: int, position: int, vocab_size: int) -> Tensor:
    """int32[V]: 31 random bits for every token at one absolute position."""
    key = mix64(mix64(seed & _MASK64) ^ position)
    x = _scrambled_ids(vocab_size) ^ _signed(key & 0xFFFFFFFF)
    x.mul_(_signed(0xC2B2AE3D))
    _shift_xor(x, 16)
    x.add_(_signed(key >> 32))
    x.mul_(_signed(0x27D4EB2F))
    _shift_xor(x, 15)
    x.mul_(_signed(0x165667B1))
    _shift_xor(x, 16)
    return x.bitwise_and_(0x7FFFFFFF)


def gumbel_row(seed: int, position: int, vocab_size: int) -> Tensor:
    """fp32[V]: standard Gumbel noise for every token at one absolute position.

    Always computed over the whole vocabulary, one row a call: so the bits cannot depend on who asks.
    """
    uniform = noise_bits(seed, position, vocab_size).to(torch.float32)
    uniform.mul_(2.0**-31).add_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one sequence: that of its seed, for every token of the target."""

    seed: int
    vocab_size: int

    def row(self, position: int) -> Tensor:
        """fp32[V]: the noise for the token at ``position``."""
        return gumbel_row(self.seed, position, self.vocab_size)

    def rows(self, positions: Sequence[int]) -> Tensor:
        """fp32[N, V]: the rows of several positions, repeated where positions repeat."""
        made = {position: self.row(position) for position in positions}
        return torch.stack([made[position] for position in positions])
