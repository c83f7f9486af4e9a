"""The target by itself: is it there, is it supported, are its files whole?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.cli.catalog.catalog import KnownDraft, find_target, of_shape
from server.engine.build import choose_dtype
from server.engine.checks.files import look_at_files, names_of
from server.engine.checks.report import Notes, Target
from server.engine.checks.words import described, facts
from server.engine.device import find_device
from server.engine.quantized import quantized
from server.engine.vocabulary import vocabulary
from server.settings.amounts import count_in_words
from server.settings.config import EngineConfig
from server.settings.resolved import target_directory
from server.text.tokenizer import SamplingDefaults, Tokenizer
from verifier.model.config import FAMILIES, ModelConfig

_SUPPORTED = ", ".join(family.models for family in FAMILIES.values())


def look_at_target(notes: Notes, config: EngineConfig) -> Target | None:
    """Note what there is to say of the target; None if not even its configuration can be read."""
    name = f"give the directory that holds {config.target}, or the hub id (OWNER/NAME) of a model you may download"
    directory = notes.attempt("target", name, lambda: target_directory(config))
    if directory is None:
        return None
    _look_at_texts(notes, directory)
    other = f"take a model of a supported family ({_SUPPORTED}) with its own config.json"
    model = notes.attempt("target", other, lambda: _model(config, directory))
    if model is None:
        return None
    device = notes.attempt("device", "leave --device out", lambda: find_device(config))
    if device is None:
        return None
    dtype = choose_dtype(config, model, device)
    look_at_files(notes, "target", directory, model, dtype.value)
    if not notes.failed("target"):
        notes.ok(
            "target",
            f"{described(model, dtype.value)}, {dtype.value} ({dtype.reason})",
            **facts(model),
            dtype=dtype.value,
        )
    return Target(config.target, directory, model, dtype, device)


def _model(config: EngineConfig, directory: Path) -> ModelConfig:
    return quantized(ModelConfig.from_directory(directory), config.quantize, "--quantize")


def _look_at_texts(notes: Notes, directory: Path) -> None:
    """What the server reads besides the model: tokenizer and recommended settings."""
    fetch = f"put the tokenizer.json and tokenizer_config.json of the model's source into {directory}"
    notes.attempt("tokenizer", fetch, lambda: vocabulary(directory))
    if not notes.failed("tokenizer"):
        notes.attempt("tokenizer", fetch, lambda: Tokenizer.load(directory))
    settings = "fetch generation_config.json again, or remove it"
    notes.attempt("target", settings, lambda: SamplingDefaults.read(directory))


# -- what the catalog knows of it --------------------------------------------------------------------------------------


def recommended(name: str, target: Target | None = None) -> str:
    """Drafts for the target in a sentence; empty where none is known. target: None if it could not be read."""
    if name == "bundled":
        return "The bundled target's own draft model comes with it: --draft draft_model, or leave --draft out."
    names = [name] if target is None else [name, *sorted(names_of(target))]
    known = find_target(*names)
    if known is not None:
        return f"Known to draft for {known.id}: {_listed(known.drafts)}; foresay pull fetches them."
    alike = [] if target is None else of_shape(target.model)
    if not alike:
        return ""
    models = [draft for draft in alike[0].drafts if draft.kind == "draft_model"]
    if not models:
        return ""
    return f"It has the shape of {alike[0].id}; if it comes from that, these may draft for it: {_listed(models)}."


def _listed(drafts: Sequence[KnownDraft]) -> str:
    return ", ".join(f"--draft {draft.setting} ({count_in_words(draft.parameters)} weights)" for draft in drafts)
