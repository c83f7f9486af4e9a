"""A model in words and numbers, and who drafts for it."""

from __future__ import annotations

from server.engine.parameters import stored_parameters
from server.engine.quantized import in_words
from server.settings.amounts import count_in_words
from server.settings.resolved import Resolved, short_name
from verifier.model.config import ModelConfig


def described(model: ModelConfig, dtype: str) -> str:
    """A model's shape for people. dtype: the engine's."""
    count = count_in_words(stored_parameters(model))
    family = model.architecture.removesuffix("ForCausalLM")
    kind = in_words(model, dtype)
    return f"{family}, {layers(model.num_layers)} of {model.hidden_size}, {count} weights{kind and f' in {kind}'}"


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
