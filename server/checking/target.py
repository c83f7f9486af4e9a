"""The target by itself: is it there, is it supported, are its files whole?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from server.amounts import count_in_words
from server.build import choose_dtype
from server.checking.files import look_at_files
from server.checking.report import Notes
from server.config import EngineConfig
from server.device import Device, find_device
from server.parameters import stored_parameters
from server.quantized import quantized
from server.resolved import Resolved, short_name, target_directory
from server.text import SamplingDefaults, Tokenizer
from server.vocabulary import vocabulary
from verifier.model.config import FAMILIES, ModelConfig

_SUPPORTED = ", ".join(family.models for family in FAMILIES.values())


@dataclass(frozen=True, slots=True)
class Target:
    """A target whose configuration could be read. name: as it was given. device: where it would run."""

    name: str
    directory: Path
    model: ModelConfig
    dtype: Resolved
    device: Device


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


def described(model: ModelConfig) -> str:
    """A model's shape for people."""
    count = count_in_words(stored_parameters(model))
    family = model.architecture.removesuffix("ForCausalLM")
    kind = "" if model.quantization is None else f" in {model.quantization}"
    return f"{family}, {layers(model.num_layers)} of {model.hidden_size}, {count} weights{kind}"


def named(choice: Resolved) -> str:
    """Who drafts, and why if nobody asked for it."""
    name = short_name(choice.value)
    return name if choice.reason == "asked for" else f"{name} ({choice.reason})"


def facts(model: ModelConfig) -> dict[str, int | str]:
    """The same for scripts."""
    return {
        "architecture": model.architecture,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "weights": stored_parameters(model),
    }


def layers(count: int) -> str:
    """``1 layer``, ``8 layers``."""
    return f"{count} layer{'' if count == 1 else 's'}"
