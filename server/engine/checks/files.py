"""The weight files of a model by their headers: are they whole, and those of its config.json?"""

from __future__ import annotations

from pathlib import Path

from server.engine.checks.report import Notes
from verifier.model.checkpoint import FLOATS, Checkpoint
from verifier.model.config import ModelConfig
from verifier.model.weights import LM_HEAD, check

_FETCH = "fetch the weight files again from where the model came from"


def look_at_files(notes: Notes, subject: str, directory: Path, model: ModelConfig, dtype: str) -> None:
    """Note what would keep the weights from being loaded, and what only the numbers themselves can tell."""
    checkpoint = notes.attempt(subject, _FETCH, lambda: Checkpoint.open(directory))
    if checkpoint is None:
        return
    mixed = "take config.json and the weight files from one and the same source"
    notes.attempt(subject, mixed, lambda: check(checkpoint, model))
    if notes.failed(subject):
        return
    if model.tie_word_embeddings and LM_HEAD in checkpoint.tensors:
        notes.warn(
            subject,
            f"{LM_HEAD} is stored although config.json ties it to the embedding; if they differ, loading will fail",
            "run this with --probe, which loads it; if it fails, set tie_word_embeddings to false",
        )
    if dtype == "float16" and any(
        tensor.dtype in FLOATS and tensor.dtype != "F16" for tensor in checkpoint.tensors.values()
    ):
        notes.warn(
            subject,
            "the weights are stored in another type, and numbers beyond 65504 would not fit float16",
            "leave --dtype out, or give bfloat16 or float32",
        )
