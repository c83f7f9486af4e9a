"""The target by itself: is it there, is it supported, are its files whole?"""

from __future__ import annotations

from pathlib import Path

from server.engine.build import choose_dtype
from server.engine.checks.files import look_at_files
from server.engine.checks.report import Notes, Target
from server.engine.checks.words import described, facts
from server.engine.device import find_device
from server.engine.quantized import quantized
from server.engine.vocabulary import vocabulary
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
        notes.ok("target", f"{described(model)}, {dtype.value} ({dtype.reason})", **facts(model), dtype=dtype.value)
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
