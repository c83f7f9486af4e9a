"""Which drafters can propose inside a captured step."""

from __future__ import annotations

from drafters.captured.draft_model import CapturedDraftModel
from drafters.captured.eagle import CapturedEagle
from drafters.captured.medusa import CapturedMedusa
from drafters.draft_model import DraftModelDrafter
from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from spec.protocols import Drafter
from spec.tree import TreeShape
from verifier.graphs.proposer import Proposer


def captured(
    drafter: Drafter | None, shape: TreeShape, sequences: int, vocab_size: int | None = None
) -> Proposer | None:
    """The drafter as it proposes for so many sequences inside a captured step; None if it has no model.

    vocab_size: the target's, if the drafter's may be larger.
    """
    if isinstance(drafter, DraftModelDrafter):
        return CapturedDraftModel(drafter, shape, sequences, vocab_size)
    if isinstance(drafter, EagleDrafter):
        return CapturedEagle(drafter, shape, sequences)
    return CapturedMedusa(drafter, shape, sequences) if isinstance(drafter, MedusaDrafter) else None
