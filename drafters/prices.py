"""What trees pay that grow by their chances, where these are: on the device, written by the host before they grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foresay.drafters.calibration import Floats
from foresay.spec.price import Price
from foresay.verifier.ops.records import Prices
from foresay.verifier.staged import Staged


class WrittenPrices:
    """Of trees of M nodes below the root, below the roots of so many sequences.

    looked: of each level, how many children of a node are looked at. best: fp32[S, M], the log chances of the nodes
    that are there before any level is grown.
    """

    def __init__(self, sequences: int, nodes: int, looked: Sequence[int], ranks: int, device: torch.device) -> None:
        self.best = torch.full((sequences, nodes), -torch.inf).to(device)
        self._looked, each = looked, torch.float32
        usual = {f"usual{depth}": ((sequences, ranks), each) for depth in range(len(looked))}
        columns = {"level": ((sequences,), each), "rows": ((sequences, nodes + 1), each)}
        self._staged = Staged(device, columns | usual)
        self._usual: list[Floats | None] = [None] * sequences

    def write(self, prices: Sequence[Price], usual: Sequence[Floats]) -> None:
        """Of the first trees. usual: [depth, rank], how often children come below a node that did."""
        to = self._staged.writable()
        for tree, (price, table) in enumerate(zip(prices, usual, strict=True)):
            count = min(len(price.rows), to["rows"].shape[1])
            to["level"][tree] = price.level
            to["rows"][tree, :count], to["rows"][tree, count:] = price.rows[:count], np.inf
            if self._usual[tree] is not table:
                self._usual[tree] = table
                self._write_usual(tree, table)
        self._staged.send()

    def _write_usual(self, tree: int, table: Floats) -> None:
        with np.errstate(divide="ignore"):
            logs = np.log(table)
        for depth, looked in enumerate(self._looked):
            to = self._staged.arrays[f"usual{depth}"][tree]
            to[:looked], to[looked:] = logs[min(depth, len(logs) - 1), :looked], -np.inf

    def below(self, depth: int) -> Prices:
        """Of the level below nodes of a depth."""
        there = self._staged.tensors
        return Prices(there["level"], there["rows"], there[f"usual{depth}"])
