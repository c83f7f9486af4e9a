"""The proposer of captured steps in which nobody drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape
from foresay.verifier.graphs.proposer import DeviceTree, Proposer, Taken, chain_columns
from foresay.verifier.graphs.state import StepState


class RootOnly:
    """Implements :class:`~foresay.verifier.graphs.proposer.Proposer`: plain decoding.

    beside: a proposer whose turn comes again, so that its caches have to follow the text.
    """

    shape: TreeShape = ROOT_ONLY

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

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Nothing is needed; the other is told who sits where."""
        if self.beside is not None:
            self.beside.prepare(sequences)
        return True

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Where nothing is drafted."""
        return scheduled.shape is not None and not scheduled.shape.levels

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Nothing is read."""

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """The root."""
        return tree

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The other's marks follow."""
        if self.beside is not None:
            self.beside.collected(sequence, tree, path)
