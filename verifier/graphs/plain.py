"""Proposers of captured steps that need no model: nobody, and the host."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import ROOT_ONLY, DraftTree, TreeShape
from verifier.graphs.proposer import DeviceTree, Proposer, Taken, chain_columns
from verifier.graphs.state import StepState, write


class RootOnly:
    """Implements :class:`~verifier.graphs.proposer.Proposer`: plain decoding.

    beside: a proposer whose turn comes again, so that its caches have to follow the text.
    """

    shape: TreeShape = ROOT_ONLY
    host: bool = False

    def __init__(self, sequences: int, device: torch.device | str, beside: Proposer | None = None) -> None:
        self.beside = beside
        self.name = ""
        self.needs: FeatureRequest | None = None if beside is None else beside.needs
        self.reach = 1
        self._columns = chain_columns(sequences, 1, device)
        self._counts = torch.ones(sequences, dtype=torch.int64, device=device)

    def propose(self, state: StepState) -> DeviceTree:
        """The roots."""
        parents, ancestors, depths = self._columns
        return DeviceTree(state.roots[:, None].contiguous(), parents, ancestors, depths, self._counts, True)

    def committed(self, state: StepState, taken: Taken) -> None:
        """What the other reads of the text is kept for it."""
        if self.beside is not None:
            self.beside.committed(state, taken)

    def prepare(self, sequences: Many[Sequence]) -> bool:
        """Nothing is needed; the other is told who sits where."""
        if self.beside is not None:
            self.beside.prepare(sequences)
        return True

    def collected(self, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
        """The other's marks follow."""
        if self.beside is not None:
            self.beside.collected(sequence, tree, path)


class FromHost:
    """Implements :class:`~verifier.graphs.proposer.Proposer`: trees that the host writes before each step.

    For lookup drafters. Trees may be smaller than the shape; what is behind them is padding.
    """

    needs: FeatureRequest | None = None
    reach: int = 1
    host: bool = True

    def __init__(self, name: str, shape: TreeShape, sequences: int, device: torch.device | str) -> None:
        self.name, self.shape = name, shape
        parents, ancestors, depths = chain_columns(sequences, shape.nodes, device)
        counts = torch.ones(sequences, dtype=torch.int64, device=device)
        self._tree = DeviceTree(torch.zeros_like(parents), parents, ancestors, depths, counts, False)

    @torch.inference_mode()
    def write(self, trees: Many[DraftTree]) -> None:
        """The trees of the next step; places behind them keep what they had."""
        tree = self._tree
        columns = zip(
            ("tokens", "parents", "ancestors", "depths"),
            (tree.tokens, tree.parents, tree.ancestors, tree.depths),
            strict=True,
        )
        for name, column in columns:
            fresh = torch.zeros(len(trees), column.shape[1], dtype=column.dtype)
            for row, made in zip(fresh, trees, strict=True):
                row[: len(made)] = getattr(made, name)
            write(column[: len(trees)], fresh)
        write(tree.counts[: len(trees)], torch.tensor([len(made) for made in trees]))

    def propose(self, state: StepState) -> DeviceTree:
        """What was written."""
        return self._tree

    def committed(self, state: StepState, taken: Taken) -> None:
        """Nothing is cached."""

    def prepare(self, sequences: Many[Sequence]) -> bool:
        """Nothing is needed."""
        return True

    def collected(self, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
        """The host's drafter is told by the runner."""
