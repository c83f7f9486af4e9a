"""Gemma 3: norms with weights less one on both sides, scaled embeddings, a rotary embedding for layers that slide."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, every, mlp, rms_norm, window
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, SANDWICH, HeadNorm, Layer, Stack
from foresay.verifier.model.rope_config import RopeConfig, read_rope


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those that slide."""
    kinds = fields.section("rope_parameters")
    if kinds is None or "full_attention" not in kinds.values:
        return read_rope(fields), RopeConfig(fields.number("rope_local_base_freq", 10_000.0))
    found = (kinds.section(kind) for kind in ("full_attention", "sliding_attention"))
    full, local = (
        Fields({**fields.values, "rope_parameters": dict(one.values) if one else {}}, fields.where) for one in found
    )
    return read_rope(full), read_rope(local)


def gemma3(fields: Fields) -> Stack:
    """Gemma 3: every layer slides but each sixth (``sliding_window_pattern``)."""
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    norm, inner = rms_norm(fields, wide=True, less_one=True), mlp(fields, "gelu", "hidden_activation")
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    scale, ropes = fields.number("query_pre_attn_scalar") ** -0.5, _ropes(fields)
    own = (
        attention(
            fields, ropes[sliding], scale=scale, window=window(fields) if sliding else None,
            biases=has, norm=HeadNorm(norm),
        )
        for sliding in every(fields, fields.integer("sliding_window_pattern", 6))
    )  # fmt: skip
    layers = tuple(Layer(each, inner, norm, SANDWICH) for each in own)
    return Stack(layers, norm, embedding_scale=fields.integer("hidden_size") ** 0.5)


#: What the configurations of its larger models leave out.
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
#: Layers of Gemma 3 27B, whose attention has a scale that is not its head's; and how far apart the layers without a
#: window are, which files do not say.
_LARGEST, _PATTERN = 62, 6


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 itself."""
    largest = fields.integer("block_count") == _LARGEST
    heads = fields.integer("attention.head_count")
    return {
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", _PATTERN),
        "query_pre_attn_scalar": fields.integer("embedding_length") // heads if largest else head_dim,
    }


_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    "Gemma3ForCausalLM": Family("Gemma 3", gemma3, _GEMMA3, Gguf("gemma3", _NAMES, windowed=True, values=_gguf_values))
}
