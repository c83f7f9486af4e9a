"""Muse Glimmer: normed embeddings, sandwiches, heads with gates; layers without a window have no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.verifier.model.families.family import (
    SANDWICH_NAMES,
    Family,
    Gguf,
    attention,
    biases,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    ropes_by_theta,
    window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, SANDWICH, HeadNorm, Layer, NormKind, Stack


def muse_glimmer(fields: Fields) -> Stack:
    """Three layers of four slide, counted from the last."""
    count = layer_count(fields)
    apart = [(count - 1 - layer) % 4 != 0 for layer in range(count)]
    norm = rms_norm(fields, wide=True, less_one=True)
    after = NormKind(fields.number("post_norm_eps", 1e-8), wide=True, less_one=True)
    plain = rms_norm(fields, wide=True, weighted=False)
    of_heads = replace(plain, weighted=fields.flag(_WEIGHTED, False))
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    head_dim = fields.integer("head_dim", 128)
    own = (
        attention(
            fields, rope, scale=fields.number("qk_scale_factor", 3.87) * head_dim**-0.5,
            window=window(fields) if sliding else None, biases=has, norm=HeadNorm(of_heads), gated=True,
        )
        for sliding, rope in zip(layer_types(fields) or apart, ropes_by_theta(fields, apart), strict=True)
    )  # fmt: skip
    inner = mlp(fields, key="hidden_activation")
    return Stack(
        tuple(Layer(each, inner, norm, SANDWICH, after=after) for each in own),
        rms_norm(fields, wide=True),
        embedding_norm=plain,
        logit_scale=fields.number("output_multiplier", 0.19611613513818404),
        logit_cap=fields.number("final_logit_softcapping", 20.0),
    )


#: GGUF files have weights for the norms of heads, with ``qk_scale_factor`` in those of queries.
_WEIGHTED = "qk_norm_weights"


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        _WEIGHTED: True,
        "qk_scale_factor": 1.0,
        "output_multiplier": fields.number("logit_scale"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


_GGUF = Gguf("muse-glimmer", {**SANDWICH_NAMES, "attn_gate": "self_attn.gate_proj"}, in_pairs=True, windowed=True,
             values=_gguf_values)  # fmt: skip
_ABSENT = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048}

FAMILIES = {"MuseGlimmerForConditionalGeneration": Family("Muse Glimmer", muse_glimmer, _ABSENT, _GGUF)}
