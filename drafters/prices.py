"""How far trees grow where they grow, on a device: written by the host before, read without it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.price import CHOICES, Bar
from foresay.verifier.graphs.capture import Staged

#: What every node reaches, and what none does.
ALWAYS, NEVER = (Bar((0.0,) * CHOICES, 0.0, level) for level in (0.0, math.inf))


class WrittenBars:
    """For each level but the last of so many trees, what its nodes must reach.

    nodes: of the largest tree. counts: int64[S], how many nodes a tree may have. rows: fp32[S, nodes], what as many
    nodes below the root cost together.
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
        """Those of the first trees; bars level by level. More nodes than rows say the price of are worth nothing."""
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
