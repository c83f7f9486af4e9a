"""Rotary position embedding: inverse frequencies, and the table of cosines and sines the decoder reads.

Half-rotation layout: with a head vector split into halves (a, b), rotated = (a cos - b sin, b cos + a sin), the angle
of pair i at position p being p * inverse_frequency[i]. All in float32: position times frequency in bfloat16 would be
wrong by whole turns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.model.angles import cos_sin
from foresay.verifier.model.portable_math import ln, power
from foresay.verifier.model.rope_config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)
from foresay.verifier.ops.records import Rotation
from foresay.verifier.ops.rows import take_both, take_rows


class RopeTable:
    """Cosines and sines of every position, each computed once; owns the tensors.

    rope: None for layers without rotation: every row is at position 0.
    cos: (max_positions, D), the D/2 angles twice, scaled by the attention factor; computed in float32, kept as dtype.
    signed_sin: likewise, its first half negated, so that swapping the halves of a head and two products rotate it.
    query_factor: (max_positions,), the factor of queries, kept as dtype; None: none.
    """

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        max_positions: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        query_scaling: QueryScaling | None = None,
    ) -> None:
        if rope is None:
            frequencies, scale, self._still = torch.empty(0), 1.0, True
            max_positions = 1
        else:
            (frequencies, scale), self._still = inverse_frequencies(rope, head_dim, max_positions), False
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        still = (0, head_dim // 2 - len(frequencies))  # pairs that are not rotated
        turned = zip(cos_sin(angles), (1.0, 0.0), strict=True)
        cos, sin = (functional.pad(numbers * scale, still, value=value) for numbers, value in turned)
        self.cos = torch.cat((cos, cos), dim=1).to(device, dtype)
        self.signed_sin = torch.cat((-sin, sin), dim=1).to(device, dtype)
        factor = None if query_scaling is None else _query_factor(query_scaling, max_positions)
        self.query_factor = None if factor is None else factor.to(device, dtype)

    def rows(self, positions: Tensor, count: Tensor | None = None) -> Rotation:
        """The tables at the ``positions`` (R,): one row of cosines and sines for all heads of a row.

        count: int64 (1,), the number of rows, read when it runs (on a CPU; None: all).
        """
        positions = torch.zeros_like(positions) if self._still else positions
        cos, signed_sin = take_both(self.cos, self.signed_sin, positions, count)
        factor = None if self.query_factor is None else take_rows(self.query_factor, positions, count)
        return Rotation(cos.unsqueeze(1), signed_sin.unsqueeze(1), factor)


def half_split_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """int64[D]: a permutation of a head's numbers after which those that are rotated together are half a head apart, so
    that a head is rotated as a whole. None if they already are."""
    rotated = rope.rotated(head_dim)
    if rotated == head_dim and not rope.interleaved:
        return None
    turning, still = torch.arange(head_dim).split((rotated, head_dim - rotated))
    first, second = (turning[::2], turning[1::2]) if rope.interleaved else turning.chunk(2)
    left, right = still.chunk(2)
    return torch.cat((first, left, second, right))


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Radians per position of each pair that is rotated, float32, and the attention factor that scales cos and sin.

    max_positions: of the longest text, by which LongRoPE chooses its factors.
    """
    rotated = rope.rotated(head_dim)
    shares = (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated).tolist()
    periods = torch.tensor([power(rope.theta, share) for share in shares])
    match rope.parameters:
        case None:
            return 1.0 / periods, 1.0
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / periods, scaling), 1.0
        case FrequencyFactors(factors=factors):
            return 1.0 / periods / torch.tensor(factors), 1.0
        case ProportionalScaling(share=share, factor=factor):
            return 1.0 / periods[: int(share * head_dim // 2)] / factor, 1.0
        case LongScaling() as scaling:
            factors = scaling.long if max_positions > scaling.original_positions else scaling.short
            return 1.0 / (torch.tensor(factors) * periods), scaling.attention_factor
        case YarnScaling() as scaling:
            return _yarn(periods, scaling, rope.theta), _attention_factor(scaling)


def _query_factor(scaling: QueryScaling, positions: int) -> Tensor:
    """float32 (positions,)."""
    times = torch.arange(positions) // scaling.original_positions
    return 1 + scaling.beta * torch.tensor([ln(1 + n) for n in range(int(times[-1]) + 1)])[times]


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """By turns within the original context: kept above high, divided by the factor below low, blended between them."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(periods: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """By pair: kept up to the one with beta_fast turns, divided by the factor from beta_slow turns on."""
    head_dim = 2 * len(periods)
    low = _pair_with_turns(scaling.beta_fast, head_dim, theta, scaling.original_positions)
    high = _pair_with_turns(scaling.beta_slow, head_dim, theta, scaling.original_positions)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # If the ramp has no width it is a step; such models were trained with division by this constant.
    width = high - low or 0.001
    keep = 1 - ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _pair_with_turns(turns: float, head_dim: int, theta: float, positions: int) -> float:
    """The (fractional) pair whose angle makes ``turns`` full turns within ``positions``."""
    return head_dim * ln(positions / (turns * 2 * math.pi)) / (2 * ln(theta))


def _attention_factor(scaling: YarnScaling) -> float:
    """YaRN's factor of cos and sin, so that longer contexts keep their attention's temperature."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return scaling.mscale_of(scaling.mscale) / scaling.mscale_of(scaling.mscale_all_dim)
    return scaling.mscale_of(1.0)
