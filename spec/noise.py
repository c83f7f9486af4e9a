"""Position-keyed Gumbel noise: the shared randomness of drafting and verifying.

The noise added to the logits at one absolute position is a function of (request seed, position, token id) alone:
never of the batch, the step, the tree or the drafter. So the token sampled at a position is the same however many
positions one forward pass computes, which is promise 1 at temperature above 0. See docs/same-tokens.md.

The hash is a 32-bit integer mix (multiply, xor-shift), the same in torch and in kernels, bit for bit. Its low 31 bits
make a uniform number whose fine end is at 0, where the winners of the exponential race are: ``E = -log1p(-u)``,
``G = -log(E)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.spec.seeds import mix64

_MASK64 = (1 << 64) - 1
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def hashed(x, low, high):  # type: ignore[no-untyped-def] # Triton would read the types
    """31 random bits for each token: int32 throughout. low, high: the halves of a position's key.

    Tensors of torch go through it, and what kernels of a GPU and of a CPU are written with: where ``>>`` keeps the
    sign, what follows takes that away.
    """
    x = x * -0x61C8864F
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7A143589
    x = (x ^ ((x >> 13) & 0x7FFFF) ^ low) * -0x3D4D51C3
    x = ((x ^ ((x >> 16) & 0xFFFF)) + high) * 0x27D4EB2F
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x165667B1
    return (x ^ ((x >> 16) & 0xFFFF)) & 0x7FFFFFFF


def noise_bits(seed: int, position: int, vocab_size: int) -> Tensor:
    """int32[V]: 31 random bits for every token at one absolute position."""
    key = torch.tensor([mix64(mix64(seed & _MASK64) ^ position)], dtype=torch.uint64).view(torch.int32)
    bits: Tensor = hashed(torch.arange(vocab_size, dtype=torch.int32), key[0], key[1])  # type: ignore[no-untyped-call]
    return bits


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
