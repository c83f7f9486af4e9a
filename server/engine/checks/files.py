"""The weight files of a model by their headers: are they whole, and those of its config.json?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.engine.checks.report import Notes, Target
from verifier.model.checkpoint import FLOATS, Checkpoint
from verifier.model.config import ModelConfig
from verifier.model.errors import ConfigError
from verifier.model.fields import Fields
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


# -- which target they say they were made for --------------------------------------------------------------------------


#: Keys that name it: Medusa's, foresay train's, those of other trainers; speculators nests its own.
_KEYS = ("base_model_name_or_path", "base_model_name", "target_model", "target_model_name_or_path")
_NESTED = ("speculators_config", "verifier", "name_or_path")


def made_for(directory: Path) -> str | None:
    """The name in the directory's config.json; None where it names nobody, or cannot be read."""
    try:
        values = Fields.read(directory / "config.json").values
    except ConfigError:
        return None
    nested: Any = values
    for key in _NESTED:
        nested = nested.get(key) if isinstance(nested, dict) else None
    found = [*map(values.get, _KEYS), nested]
    return next((name for name in found if isinstance(name, str) and name), None)


def look_at_origin(notes: Notes, subject: str, directory: Path, target: Target) -> None:
    """Warn if the target goes by another name than the one it was made for; a name proves nothing, so no more."""
    name = made_for(directory)
    if name is not None and _last(name) not in names_of(target):
        notes.warn(
            subject,
            f"its config.json says that it was made for {name}, which is not what {target.name} is called",
            f"if {target.name} is not that model under another name, name what was made for it; --probe measures "
            "how often it is right",
            made_for=name,
        )


def names_of(target: Target) -> set[str]:
    """What the target may be called: as given, its folder, its hub repository, what its own files say."""
    names = {target.name, target.directory.name}
    snapshot = next((part for part in target.directory.parts if part.startswith("models--")), "")
    names.add(snapshot.replace("--", "/"))
    names.add(str(Fields.read(target.directory / "config.json").get("_name_or_path") or ""))
    if target.name == "bundled":
        names |= {"bundled", "foresay/bundled"}
    return {_last(name) for name in names}


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
