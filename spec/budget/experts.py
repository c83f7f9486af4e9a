"""How many experts of a mixture a step wakes, and what each takes.

n rows that have nothing in common wake D = E (1 - (1 - k / E)^n) of E experts where each row is for k. Rows of a text
have, so each counts there for a share of a row: a node below another, one beside another, and the root of another text.
These three shares are learned from what steps woke: what D says of n is a sum of them (a Kalman filter).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foresay.spec.tree import DraftTree

Floats = NDArray[np.float64]

#: What a row is taken to count for before any step (below, beside, another text), how unsure that is, by how much what
#: rows count for differs from step to step, and how fast it changes.
_SHARES, _UNSURE, _NOISE, _DRIFT = (0.5, 0.6, 0.8), 0.1, 0.02, 1e-5
_LEAST, _NEARLY_ALL = 0.02, 0.97


def kinds(sequences: int, trees: Sequence[DraftTree]) -> Floats:
    """Rows of a step beside its first: below another, beside another, of another text."""
    below = sum(len(set(tree.parents[1:])) for tree in trees)
    drafted = sum(len(tree) - 1 for tree in trees)
    return np.array((below, drafted - below, sequences - 1), dtype=np.float64)


class Experts:
    """count: E. chosen: k. seconds: what one more that is woken takes a pass, in all layers together, as measured.
    Numbers of woken experts are means of the layers."""

    def __init__(self, count: int, chosen: int, seconds: float) -> None:
        self.count, self.chosen, self.seconds = count, chosen, seconds
        self._all = chosen >= count
        self._log = -1.0 if self._all else math.log1p(-chosen / count)
        self.shares, self._covariance = np.array(_SHARES), _UNSURE * np.eye(3)

    def woken(self, rows: Floats) -> Floats:
        """Expected of so many rows of each kind beside the first, [..., 3]."""
        found: Floats = self.count * -np.expm1(self._log * (1.0 + rows @ self.shares))
        return found

    def saw(self, rows: Floats, woken: float) -> None:
        """A step woke so many; where that is nearly all, nobody can tell what its rows counted for."""
        if not rows.any() or self._all or not 0.0 < woken < _NEARLY_ALL * self.count:
            return
        self._covariance += _DRIFT * np.eye(3)
        counted = math.log1p(-woken / self.count) / self._log - 1.0
        gains = self._covariance @ rows
        whole = _NOISE * float(rows.sum()) + float(rows @ gains)
        self.shares = np.clip(self.shares + gains * (counted - float(rows @ self.shares)) / whole, _LEAST, 1.0)
        self._covariance -= np.outer(gains, gains / whole)

    def chain(self, most: int, sequences: int) -> Floats:
        """Expected of 0, 1, .. ``most`` rows, each below the one before in one of so many texts."""
        rows, zeros = np.arange(most + 1.0), np.zeros(most + 1)
        roots = np.minimum(rows, sequences)
        return self.woken(np.stack((rows - roots, zeros, np.maximum(roots - 1.0, zeros)), axis=1))

    def beside(self, chain: Floats) -> Floats:
        """How many more one of as many rows wakes if it stands beside another, not below. chain: see above."""
        more: Floats = (self.shares[1] - self.shares[0]) * (self.count - chain) * -self._log
        return more
