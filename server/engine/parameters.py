"""What a model's weights and its KV cache are kept in. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from foresay.server.settings.resolved import Unfit
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.quantization import Quantization


def quantized(model: ModelConfig, how: str | None, flag: str) -> ModelConfig:
    """The model as it is to be loaded. how: the setting's value. Raises Unfit for one that is quantised already."""
    if how is None:
        return model
    if model.quantization is not None:
        found = f"its weights are quantised already ({model.quantization})"
        raise Unfit(f"{flag} {how}: {found}", f"leave {flag} out, or name the model that it was made from")
    return replace(model, quantization=Quantization.made(how))


def kv_kind(model: ModelConfig, asked: str) -> str:
    """``int8``, ``fp8``, or ``auto`` for the engine's dtype. asked: the setting's value, of which ``auto`` is what
    config.json asks for (``kv_cache_scheme``)."""
    return (asked == "auto" and model.quantization is not None and model.quantization.kv) or asked


def in_words(model: ModelConfig, dtype: str, activations: str) -> str:
    """How the weights are quantised, for people; "" if they are not. dtype, activations: the engine's."""
    found = model.quantization
    if found is None:
        return ""
    source = "made of the files' floats" if found.is_made else f"from {found.method} files"
    rounded = f"not rounded to {found.activations}" if found.activations else "not rounded"
    stay = "activations rounded to int8" if activations == "int8" else f"activations stay {dtype}, {rounded}"
    return f"{found} ({source}; {stay})"
