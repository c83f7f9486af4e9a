"""A drafter with logits inside captured steps: on the device, with shapes that never change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from foresay.drafters.calibration import Calibration, Curves, kind_of
from foresay.drafters.grown import Grown
from foresay.drafters.growth import Growth, Level, Plan, levels
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
        columns = drafter.columns(vocab_size)
        self._plan = Plan(self.shape, sequences, drafter.device, drafter.dynamic, drafter.free, columns)
        self._curves = Curves(sequences, drafter.device)
        self._grown: dict[str, Grown] = {}

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root: a pass for each level."""
        growth = Growth(self._plan, state, self.drafter.token_ids, self._curves)
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

    def write(self, sequences: Sequence[SequenceState]) -> None:
        """What its chances are worth by now."""
        self._curves.write(self.drafter.calibration, [kind_of(sequence.sampling) for sequence in sequences])

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """With chances, of a tree that grew by them; it will be learnt from."""
        if not more:
            return tree
        *parts, places = more
        grown = Grown(sequence, self.shape, True, self.drafter.calibration, None, tree.tokens[:1].tolist())
        grown.fixed = self._plan.levels
        each = len(parts) // len(grown.fixed)
        for level in (Level(*parts[first : first + each]) for first in range(0, len(parts), each)):
            grown.add(level.tokens[index].tolist(), level, index)
        grown.kept = [0, *(place + 1 for place in places[index, : len(tree) - 1].tolist())]
        self._grown[sequence.id] = grown
        return replace(tree, chances=tuple(math.exp(grown.scores[node]) for node in grown.kept), grown=grown.depth)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Marks are set, and the calibration learns."""
        self.drafter.collected(sequence, tree, path)
        if grown := self._grown.pop(sequence.id, None):
            grown.learn(path)
        else:
            _learn(self.drafter.calibration, sequence, tree, path)


def on_device(drafter: Drafter | None) -> TreeDrafter | None:
    """A drafter that can be captured with the step; None for one that drafts on the host, and for nobody."""
    return drafter if isinstance(drafter, TreeDrafter) else None


def _learn(calibration: Calibration, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
    """Whether each level of a chain was hit. Chances of static trees stay on the device, so nothing is learnt of those.

    path: nodes of the tree that were committed, their samples already in the sequence's tokens.
    """
    if not tree.is_chain:
        return
    sampled = sequence.tokens[len(sequence.tokens) - len(path) :]
    kind, drafted = kind_of(sequence.sampling), tree.tokens.tolist()[1:]
    for depth, (token, draft) in enumerate(zip(sampled, drafted, strict=False)):
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
