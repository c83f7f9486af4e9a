"""Granite 3 and 4.1 (dense): embeddings, branches, scores and logits are multiplied by numbers of config.json."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, layer_count, mlp, rms_norm
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, Layer, Stack
from foresay.verifier.model.rope_config import read_rope


def granite(fields: Fields) -> Stack:
    """Granite."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields), scale=fields.number("attention_multiplier", 1.0), biases=has)
    inner = mlp(fields, bias=fields.flag("mlp_bias", False))
    layer = Layer(own, inner, norm, share=fields.number("residual_multiplier", 1.0))
    return Stack(
        (layer,) * layer_count(fields),
        norm,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.optional_number("attention.scale") or head_dim**-0.5,
        "residual_multiplier": fields.optional_number("residual_scale"),
        "embedding_multiplier": fields.optional_number("embedding_scale"),
        "logits_scaling": fields.optional_number("logit_scale"),
    }


_GGUF = Gguf("granite", in_pairs=True, values=_gguf_values)

FAMILIES = {"GraniteForCausalLM": Family("Granite 3, Granite 4.1", granite, gguf=_GGUF)}
