"""What a tree's nodes must reach for it to grow on, where it grows: written by the host before, read on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.price import Bar
from foresay.verifier.staged import Staged


class WrittenBars:
    """For each level but the last of so many trees."""

    def __init__(self, sequences: int, levels: int, device: torch.device) -> None:
        self._staged = Staged(device, {"bars": ((levels, sequences, 2), torch.float32)})

    def write(self, trees: Sequence[Sequence[Bar]]) -> None:
        """Those of the first trees, level by level."""
        to = self._staged.writable()["bars"]
        for tree, bars in enumerate(trees):
            for level, bar in enumerate(bars):
                to[level, tree] = bar
        self._staged.send()

    def below(self, depth: int) -> Tensor:
        """fp32[S, 2]: for the level below nodes of a depth."""
        return self._staged.tensors["bars"][depth - 1]
