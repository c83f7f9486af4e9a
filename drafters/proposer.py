"""A drafter with logits inside captured steps: on the device, with shapes that never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foresay.drafters.calibration import Calibration, kind_of
from foresay.drafters.growth import Growth, Plan, levels
from foresay.drafters.levels import TreeDrafter
from foresay.spec.protocols import Drafter, FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.graphs.proposer import DeviceTree, Taken
from foresay.verifier.graphs.state import StepState

_UNKNOWN = np.array([np.nan])


class Drafts:
    """Implements :class:`foresay.verifier.graphs.proposer.Proposer`, with the same passes and stores as step by step.

    vocab_size: the target's.
    """

    def __init__(self, drafter: TreeDrafter, shape: TreeShape, sequences: int, vocab_size: int) -> None:
        self.drafter, self.shape, self.name = drafter, drafter.limited(shape), drafter.name
        self.needs: FeatureRequest | None = drafter.needs
        self.reach = drafter.reach(self.shape.levels)
        self._plan = Plan(self.shape, sequences, drafter.device, columns=drafter.columns(vocab_size))

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root: a pass for each level."""
        growth = Growth(self._plan, state, self.drafter.token_ids)
        for _ in levels(growth, self.drafter):
            pass
        return growth.tree()

    def committed(self, state: StepState, taken: Taken) -> None:
        """What it stores of the texts follows them."""
        self.drafter.follow(state, taken, self.shape.levels)

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Compute what the first pass does not. False if it cannot draft for one of them."""
        for sequence in sequences:
            if not self.drafter.able(sequence):
                return False
            self.drafter.prepare(sequence, self.shape.levels)
        return True

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Marks are set, and the calibration learns."""
        self.drafter.collected(sequence, tree, path)
        _learn(self.drafter.calibration, sequence, tree, path)


def on_device(drafter: Drafter | None) -> TreeDrafter | None:
    """A drafter that can be captured with the step; None for one that drafts on the host, and for nobody."""
    return drafter if isinstance(drafter, TreeDrafter) else None


def _learn(calibration: Calibration, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
    """Whether each level of a chain was hit. Chances of other trees stay on the device, so nothing is learnt of those.

    path: nodes of the tree that were committed, their samples already in the sequence's tokens.
    """
    if not tree.is_chain:
        return
    sampled = sequence.tokens[len(sequence.tokens) - len(path) :]
    kind, drafted = kind_of(sequence.sampling), tree.tokens[1:]
    for depth, (token, draft) in enumerate(zip(sampled, drafted, strict=False)):
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
