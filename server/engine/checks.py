"""Findings of ``foresay check`` as records; a model in words; and checks of its weight files by their headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from foresay.server.catalog.catalog import parameters_of
from foresay.server.engine.device import Device
from foresay.server.engine.parameters import in_words
from foresay.server.settings.resolved import CannotRun, Resolved, short_name
from foresay.server.settings.units import count_in_words, counted
from foresay.spec.errors import ForesayError
from foresay.verifier.model.checkpoint import FLOATS, Checkpoint
from foresay.verifier.model.config import ModelConfig, idle_parameters
from foresay.verifier.model.weights import LM_HEAD, check

Status = Literal["ok", "warn", "fail"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A target whose configuration could be read. name: as given. device: where it would run."""

    name: str
    directory: Path
    model: ModelConfig
    dtype: Resolved
    activations: Resolved
    device: Device


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. fix: a sentence on what would fix it, unless ``ok``. facts: as numbers."""

    subject: str
    status: Status
    text: str
    fix: str = ""
    facts: dict[str, Any] = {}


class Notes:
    """Collects findings, so that everything wrong is reported, not only the first thing."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def ok(self, subject: str, text: str, **facts: Any) -> None:
        """Something is as it should be."""
        self.findings.append(Finding(subject=subject, status="ok", text=text, facts=facts))

    def warn(self, subject: str, text: str, fix: str, **facts: Any) -> None:
        """It works, but not well."""
        self.findings.append(Finding(subject=subject, status="warn", text=text, fix=_sentence(fix), facts=facts))

    def fail(self, subject: str, text: str, fix: str, **facts: Any) -> None:
        self.findings.append(Finding(subject=subject, status="fail", text=text, fix=_sentence(fix), facts=facts))

    def attempt(self, subject: str, fix: str, read: Callable[[], T]) -> T | None:
        """What ``read`` returns; None, and a failed finding, if it raises one of Foresay's errors.

        fix: for errors without a fix of their own.
        """
        try:
            return read()
        except CannotRun as error:
            self.fail(subject, error.fault, error.hint)
        except ForesayError as error:
            self.fail(subject, " ".join(str(error).split()), fix)
        return None

    def doubted(self, *subjects: str) -> bool:
        """Whether any finding on these subjects is not ``ok``."""
        return any(finding.status != "ok" and finding.subject in subjects for finding in self.findings)

    def failed(self, *subjects: str) -> bool:
        """Whether anything failed, on these subjects if any are given."""
        return any(
            finding.status == "fail" and (not subjects or finding.subject in subjects) for finding in self.findings
        )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


_FETCH = "fetch the weight files again from where the model came from"


def look_at_files(notes: Notes, subject: str, directory: Path, model: ModelConfig, dtype: str) -> None:
    """Note what would prevent loading the weights, and what only loading them can show."""
    checkpoint = notes.attempt(subject, _FETCH, lambda: Checkpoint.open(directory))
    if checkpoint is None:
        return
    mixed = "take config.json and the weight files from the same source"
    notes.attempt(subject, mixed, lambda: check(checkpoint, model))
    if notes.failed(subject):
        return
    if model.tie_word_embeddings and LM_HEAD in checkpoint.tensors:
        notes.warn(
            subject,
            f"{LM_HEAD} is stored although config.json ties it to the embedding; if they differ, loading will fail",
            "load it (foresay serve); if it fails, set tie_word_embeddings to false",
        )
    if dtype == "float16" and any(
        tensor.dtype in FLOATS and tensor.dtype != "F16" for tensor in checkpoint.tensors.values()
    ):
        notes.warn(
            subject,
            "the weights are stored in another type, and numbers beyond 65504 would not fit float16",
            "leave --dtype out, or give bfloat16 or float32",
        )


def described(model: ModelConfig, dtype: str, activations: str) -> str:
    """A model's shape for people. dtype, activations: the engine's."""
    count = count_in_words(parameters_of(model))
    family = model.architecture.removesuffix("ForCausalLM")
    kind = in_words(model, dtype, activations)
    if idle := idle_parameters(model):
        count = f"{count} weights, of which a token reads {count_in_words(parameters_of(model) - idle)}"
    else:
        count = f"{count} weights"
    return f"{family}, {counted(model.num_layers, 'layer')} of {model.hidden_size}, {count}{kind and f' in {kind}'}"


def named(choice: Resolved) -> str:
    """The drafter's name, and the reason if it was not requested."""
    name = short_name(choice.value)
    return name if choice.reason == "asked for" else f"{name} ({choice.reason})"


def facts(model: ModelConfig) -> dict[str, int | str]:
    """A model's shape for scripts."""
    return {
        "architecture": model.architecture,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "weights": parameters_of(model),
    }
