"""How many experts of a mixture a step activates, and what each takes.

n independent rows activate D = E (1 - (1 - k / E)^n) of E experts if each row is for k. Rows of a text are not
independent, so each counts as a share of a row: a node below another, a sibling, and the root of another text. These
three shares are learnt from steps: the n that D was measured for is a sum of them (a Kalman filter).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foresay.spec.tree import DraftTree

Floats = NDArray[np.float64]

#: The shares of a row at first (below, sibling, another text), their variance, the variance of each row's count between
#: steps, and how fast the shares change.
_SHARES, _UNSURE, _NOISE, _DRIFT = (0.5, 0.6, 0.8), 0.1, 0.02, 1e-5
_LEAST, _NEARLY_ALL = 0.02, 0.97


def kinds(sequences: int, trees: Sequence[DraftTree]) -> Floats:
    """Rows of a step besides its first: below another node, siblings, of another text."""
    below = sum(len(set(tree.parents[1:])) for tree in trees)
    drafted = sum(len(tree) - 1 for tree in trees)
    return np.array((below, drafted - below, sequences - 1), dtype=np.float64)


class Experts:
    """count: E. chosen: k. seconds: what one more active expert takes in a pass, in all layers together, as measured.
    Numbers of active experts are means over the layers."""

    def __init__(self, count: int, chosen: int, seconds: float) -> None:
        self.count, self.chosen, self.seconds = count, chosen, seconds
        self._all = chosen >= count
        self._log = -1.0 if self._all else math.log1p(-chosen / count)
        self.shares, self._covariance = np.array(_SHARES), _UNSURE * np.eye(3)

    def woken(self, rows: Floats) -> Floats:
        """The expected number for so many rows of each kind besides the first, [..., 3]."""
        found: Floats = self.count * -np.expm1(self._log * (1.0 + rows @ self.shares))
        return found

    def saw(self, rows: Floats, woken: float) -> None:
        """Learn from a step's number; one with nearly all experts shows nothing about the shares."""
        if not rows.any() or self._all or not 0.0 < woken < _NEARLY_ALL * self.count:
            return
        self._covariance += _DRIFT * np.eye(3)
        counted = math.log1p(-woken / self.count) / self._log - 1.0
        gains = self._covariance @ rows
        whole = _NOISE * float(rows.sum()) + float(rows @ gains)
        self.shares = np.clip(self.shares + gains * (counted - float(rows @ self.shares)) / whole, _LEAST, 1.0)
        self._covariance -= np.outer(gains, gains / whole)

    def chain(self, most: int, sequences: int) -> Floats:
        """The expected numbers for 0, 1, .. ``most`` rows, each below the one before in one of so many texts."""
        rows, zeros = np.arange(most + 1.0), np.zeros(most + 1)
        roots = np.minimum(rows, sequences)
        return self.woken(np.stack((rows - roots, zeros, np.maximum(roots - 1.0, zeros)), axis=1))

    def siblings(self, chain: Floats) -> Floats:
        """How many more each row activates as a sibling than below another node. chain: see :meth:`chain`."""
        more: Floats = (self.shares[1] - self.shares[0]) * (self.count - chain) * -self._log
        return more
