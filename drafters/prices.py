"""The limits of tree growth on a device: written by the host before a step, and read by the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.price import CHOICES, Bar
from foresay.verifier.graphs.staging import Staged

#: A threshold that every node reaches, and one that none does.
ALWAYS, NEVER = (Bar((0.0,) * CHOICES, 0.0, level) for level in (0.0, math.inf))


class WrittenBars:
    """The thresholds that nodes must reach, for each level but the last of some trees.

    nodes: of the largest tree. counts: int64[S], how many nodes a tree may have. rows: fp32[S, nodes], the total cost
    of 0, 1, .. nodes below the root.
    """

    def __init__(self, sequences: int, levels: int, device: torch.device, nodes: int = 0) -> None:
        bars = {"bars": ((levels, sequences, CHOICES + 2), torch.float32)}
        self._staged = Staged(
            device, bars | {"counts": ((sequences,), torch.int64), "rows": ((sequences, nodes), torch.float32)}
        )
        self.counts, self.rows = self._staged.tensors["counts"], self._staged.tensors["rows"]

    def write(
        self, bars: Sequence[Sequence[Bar]], counts: Sequence[int] = (), rows: Sequence[Sequence[float]] = ()
    ) -> None:
        """Write those of the first trees; bars level by level. Nodes past the given rows are never worth it."""
        to = self._staged.writable()
        for tree, levels in enumerate(bars):
            for level, bar in enumerate(levels):
                to["bars"][level, tree] = *bar.shares, bar.row, bar.level
        to["counts"][: len(counts)] = counts
        for tree, prices in enumerate(rows):
            known = prices[: to["rows"].shape[1]]
            to["rows"][tree, : len(known)], to["rows"][tree, len(known) :] = known, math.inf
        self._staged.send()

    def below(self, depth: int) -> Tensor:
        """fp32[S, N]: the bars of the level below nodes of a depth."""
        return self._staged.tensors["bars"][depth - 1]
