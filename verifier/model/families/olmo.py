"""OLMo 2 and 3, Exaone 4: norms only after attention and the MLP, and of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.verifier.model.families.family import (
    Family,
    Gguf,
    attention,
    biases,
    every,
    layer_count,
    mlp,
    rms_norm,
    ropes_by_kind,
    window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import AFTER, HeadNorm, Layer, Stack
from foresay.verifier.model.products import OUTPUT, QKV
from foresay.verifier.model.rope_config import read_rope


def olmo2(fields: Fields) -> Stack:
    """OLMo 2: queries and keys are normalised over all heads."""
    norm, has = rms_norm(fields, wide=True), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields), biases=has, norm=HeadNorm(norm, whole=True))
    return Stack((Layer(own, mlp(fields), norm, AFTER),) * layer_count(fields), norm)


def olmo3(fields: Fields) -> Stack:
    """OLMo 3: three of four layers have a sliding window; the others may have a longer rotary embedding."""
    norm, inner = rms_norm(fields, wide=True), mlp(fields)
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    ropes = ropes_by_kind(fields) or _same_theta(fields)
    own = (
        attention(
            fields, ropes[sliding], window=window(fields) if sliding else None, biases=has,
            norm=HeadNorm(norm, whole=True),
        )
        for sliding in every(fields, 4)
    )  # fmt: skip
    return Stack(tuple(Layer(each, inner, norm, AFTER) for each in own), norm)


def _same_theta(fields: Fields) -> tuple[Any, Any]:
    """The rotary embeddings of full-attention layers, and of sliding-window layers, which are not scaled."""
    full = read_rope(fields)
    return full, replace(full, parameters=None)


def exaone4(fields: Fields) -> Stack:
    """Exaone 4: if some layers have a sliding window, the others have no rotary embedding."""
    norm, inner = rms_norm(fields), mlp(fields)
    whole = fields.values.get("sliding_window", 4096) is None
    slides = (False,) * layer_count(fields) if whole else every(fields, _pattern(fields))
    rope = read_rope(fields)
    own = (
        attention(
            fields, rope if whole or sliding else None, window=window(fields) if sliding else None, norm=HeadNorm(norm)
        )
        for sliding in slides
    )
    return Stack(tuple(Layer(each, inner, norm, AFTER) for each in own), norm)


def _pattern(fields: Fields) -> int:
    """The distance between layers without a window: a number, or a word in which G is such a layer ("LLLG")."""
    found = fields.get("sliding_window_pattern")
    return len(found) if isinstance(found, str) and found else fields.integer("sliding_window_pattern", 4)


_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_OLMO = {"rms_norm_eps": 1e-5}
_OLMO3 = {**_OLMO, "rope_theta": 500_000.0}

FAMILIES = {
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2, _OLMO, Gguf("olmo2", _BEHIND)),
    "Olmo3ForCausalLM": Family("OLMo 3", olmo3, _OLMO3, Gguf("olmo2", _BEHIND, windowed=True)),
    "Exaone4ForCausalLM": Family("Exaone 4", exaone4, _OLMO, Gguf("exaone4", _BEHIND, windowed=True)),
}
