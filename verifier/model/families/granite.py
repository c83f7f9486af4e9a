"""Granite 3 and 4.1 (dense): embeddings, branches, scores and logits are multiplied by numbers of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.verifier.model.families.family import (
    Family,
    Gguf,
    attention,
    biases,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    ropes_by_theta,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import MLP, Attention, Experts, Layer, Mixer, Stack
from foresay.verifier.model.products import OUTPUT, QKV
from foresay.verifier.model.rope_config import RopeConfig, read_rope


def granite(fields: Fields) -> Stack:
    """Granite."""
    return granite_stack(fields, mlp(fields, bias=fields.flag("mlp_bias", False)))


def granite_stack(fields: Fields, inner: MLP | Experts, own: Sequence[Mixer] = ()) -> Stack:
    """Layers of attention, or of the mixers in ``own``, each followed by ``inner``."""
    return _stack(fields, own or [granite_attention(fields, read_rope(fields))] * layer_count(fields), inner)


def granite_swa(fields: Fields) -> Stack:
    """Granite with windows: heads have sinks, and every fourth layer, including the first, has full attention."""
    slides = layer_types(fields) or tuple(layer % 4 != 0 for layer in range(layer_count(fields)))
    ropes = ropes_by_theta(fields, (True,) * len(slides))
    seen = [fields.integer("sliding_window", 128) if sliding else None for sliding in slides]
    own = (granite_attention(fields, rope, window=each, sinks=True) for rope, each in zip(ropes, seen, strict=True))
    return _stack(fields, list(own), mlp(fields, bias=fields.flag("mlp_bias", False)))


def granite_attention(fields: Fields, rope: RopeConfig | None, **more: Any) -> Attention:
    """Attention with the score multiplier of config.json."""
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    return attention(fields, rope, scale=fields.number("attention_multiplier", 1.0), biases=has, **more)


def _stack(fields: Fields, own: Sequence[Mixer], inner: MLP | Experts) -> Stack:
    norm, share = rms_norm(fields), fields.number("residual_multiplier", 1.0)
    return Stack(
        tuple(Layer(each, inner, norm, share=share) for each in own),
        norm,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def granite_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The multipliers in its GGUF files."""
    return {
        "attention_multiplier": fields.optional_number("attention.scale") or head_dim**-0.5,
        "residual_multiplier": fields.optional_number("residual_scale"),
        "embedding_multiplier": fields.optional_number("embedding_scale"),
        "logits_scaling": fields.optional_number("logit_scale"),
    }


_GGUF = Gguf("granite", in_pairs=True, values=granite_values)

_SWA = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}

FAMILIES = {
    "GraniteForCausalLM": Family("Granite 3, Granite 4.1", granite, gguf=_GGUF),
    "GraniteSWAForCausalLM": Family("Granite SWA", granite_swa, _SWA),
}
