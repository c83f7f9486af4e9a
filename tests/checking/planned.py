"""A draft model of a shape that no directory holds, for the arithmetic of memory."""

from __future__ import annotations

from foresay.server.engine.drafters.models import DraftModel
from foresay.verifier.model.config import ModelConfig


def draft_of(model: ModelConfig) -> DraftModel:
    """One whose config.json was read already."""
    draft = DraftModel("draft")
    vars(draft)["model"] = model
    return draft
