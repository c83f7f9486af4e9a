"""Medians with their spread, ratios with a bootstrap interval, and the share of distinct trigrams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Median and quartiles of a sample."""

    q1: float
    median: float
    q3: float
    size: int

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.q1:.4g}, {self.q3:.4g}]"


def spread(values: Sequence[float]) -> Spread:
    """Quartiles by linear interpolation; ``values`` must not be empty."""
    q1, median, q3 = np.percentile(values, (25, 50, 75))
    return Spread(float(q1), float(median), float(q3), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` percent lie."""
    return float(np.percentile(values, share))


class Ratio(NamedTuple):
    """A ratio with its 95 % bootstrap interval."""

    low: float
    ratio: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(pairs: Mapping[str, Sequence[tuple[float, float]]], resamples: int = 2000, seed: int = 0) -> Ratio:
    """Geometric mean of a/b over all pairs; ``pairs`` maps a prompt to its (a, b) of every round.

    The bootstrap draws prompts, not runs: the rounds of one prompt are not independent.
    """
    logs = {name: np.log([a / b for a, b in rounds]) for name, rounds in pairs.items()}
    means = pooled_ratio({name: (each.sum(), len(each)) for name, each in logs.items()}, resamples, seed)
    return Ratio(*map(math.exp, means))


def pooled_ratio(pairs: Mapping[str, tuple[float, float]], resamples: int = 2000, seed: int = 0) -> Ratio:
    """All a over all b; ``pairs`` maps a prompt to its own sums of both. The bootstrap draws prompts."""
    tops, bottoms = np.array(list(pairs.values())).T
    picks = np.random.default_rng(seed).integers(0, len(tops), (resamples, len(tops)))
    low, high = np.percentile(tops[picks].sum(1) / bottoms[picks].sum(1), (2.5, 97.5))
    return Ratio(float(low), float(tops.sum() / bottoms.sum()), float(high))


def distinct_trigrams(tokens: Sequence[int]) -> float:
    """Share of the text's trigrams that are distinct: 1.0 never repeats itself, 0.1 is stuck in a loop."""
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(trigrams)) / len(trigrams) if trigrams else 1.0
