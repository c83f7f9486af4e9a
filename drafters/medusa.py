"""Medusa heads propose: each guesses a token further on from the hidden state of the last committed row.

One small product per depth for all sequences, no pass over the text; what is stored is the hidden state of each
position. Heads do not see what the others chose, so below every node of a depth the candidates are the same.
"""

from __future__ import annotations

from torch import Tensor

from foresay.drafters.fed import FeatureDrafter
from foresay.drafters.growth import Growth
from foresay.kvpaging import PagePool
from foresay.spec.names import MEDUSA
from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.medusa import MedusaHeads


class MedusaDrafter(FeatureDrafter):
    """Drafts with heads, as deep as there are heads."""

    free = True

    def __init__(self, heads: MedusaHeads, pool: PagePool, dynamic: bool = True, name: str = MEDUSA) -> None:
        needs, width = FeatureRequest(final=True), heads.hidden_size
        super().__init__(name, dynamic, pool, needs, width, heads.dtype, heads.device, heads.token_map)
        self.heads = heads

    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the state that the target's output head multiplies."""
        return features["final"]

    def limited(self, shape: TreeShape) -> TreeShape:
        """Not deeper than there are heads."""
        return shape.limited(len(self.heads))

    def reach(self, levels: int) -> int:
        """The root, for the state it was sampled from."""
        return 1

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The first head, run once for all sequences."""
        hidden = self.before(state, levels)
        return self.heads(hidden, 0), hidden

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next head: the same below every node."""
        assert states is not None, "the roots' hidden rows"
        depth = len(growth.levels)
        logits = self.heads(states, depth)
        if growth.plan.apart:
            logits = logits.repeat_interleave(growth.plan.levels[depth].front, dim=0)
        return logits, states
