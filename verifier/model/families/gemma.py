"""Gemma 2 and 3, Muse Glimmer: norms before and after blocks, with weights stored minus one, and sliding windows.

Muse Glimmer has normalised embeddings, sandwich norms and gated heads; layers without a window have no rotary
embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.verifier.model.families.family import (
    SANDWICH_NAMES,
    Family,
    Gguf,
    attention,
    biases,
    every,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    ropes_by_kind,
    ropes_by_theta,
    window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import SANDWICH, HeadNorm, Layer, Stack
from foresay.verifier.model.products import OUTPUT, QKV, NormKind
from foresay.verifier.model.rope_config import RopeConfig, read_rope


def gemma2(fields: Fields) -> Stack:
    """Gemma 2: every other layer has a sliding window; scores and logits are capped."""
    caps = (fields.optional_number(f"{name}_logit_softcapping") for name in ("attn", "final"))
    attn_cap, final_cap = caps
    rope = read_rope(fields)
    stack = _stack(fields, (rope, rope), pattern=2, softcap=attn_cap)
    return replace(stack, logit_cap=final_cap)


def gemma3(fields: Fields) -> Stack:
    """Gemma 3: all but every sixth layer (``sliding_window_pattern``) have a sliding window, with their own rotary
    embedding; heads are normalised."""
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping")
    ropes = ropes_by_kind(fields) or (read_rope(fields), RopeConfig(fields.number("rope_local_base_freq", 10_000.0)))
    pattern = fields.integer("sliding_window_pattern", 6)
    return _stack(fields, ropes, pattern, norm=HeadNorm(_norm(fields)))


def _norm(fields: Fields) -> NormKind:
    return rms_norm(fields, wide=True, less_one=True)


def _stack(fields: Fields, ropes: tuple[RopeConfig, RopeConfig], pattern: int, **more: Any) -> Stack:
    """ropes: of full-attention and of sliding-window layers. more: of attention."""
    fields.refuse("use_bidirectional_attention")
    norm, inner = _norm(fields), mlp(fields, "gelu", "hidden_activation")
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    own = (
        attention(
            fields, ropes[sliding], scale=scale, window=window(fields) if sliding else None, biases=has, **more
        )
        for sliding in every(fields, pattern)
    )  # fmt: skip
    layers = tuple(Layer(each, inner, norm, SANDWICH) for each in own)
    return Stack(layers, norm, embedding_scale=fields.integer("hidden_size") ** 0.5)


#: Values that the configurations of its larger models leave out.
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
_GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
#: The distance between Gemma 3's layers without a window, which files do not state.
_PATTERN = 6


def _gguf3(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Values of Gemma 3 that llama.cpp hard-codes."""
    pattern = fields.get("attention.sliding_window_pattern")
    return {
        "sliding_window_pattern": _PATTERN if isinstance(pattern, list) else pattern or _PATTERN,
        "query_pre_attn_scalar": _scalar(fields, head_dim, largest=62),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
    }


def _gguf2(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The same for Gemma 2."""
    caps = {key: fields.number(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {"query_pre_attn_scalar": _scalar(fields, head_dim, largest=46), **caps}


def _scalar(fields: Fields, head_dim: int, largest: int) -> int:
    """largest: the number of layers of the family's largest model, whose attention scale does not follow from the head
    width."""
    whole = fields.integer("embedding_length") // fields.integer("attention.head_count")
    return whole if fields.integer("block_count") == largest else head_dim


_GGUF2 = Gguf("gemma2", SANDWICH_NAMES, windowed=True, values=_gguf2)
_GGUF3 = Gguf("gemma3", SANDWICH_NAMES, windowed=True, values=_gguf3)

FAMILIES = {
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2, _GEMMA2, _GGUF2),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma3, _GEMMA3, _GGUF3),
}


def muse_glimmer(fields: Fields) -> Stack:
    """Three of four layers have a sliding window, counted from the last."""
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


def _gguf_muse(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        _WEIGHTED: True,
        "qk_scale_factor": 1.0,
        "output_multiplier": fields.number("logit_scale"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


_GGUF_MUSE = Gguf("muse-glimmer", {**SANDWICH_NAMES, "attn_gate": "self_attn.gate_proj"}, in_pairs=True, windowed=True,
             values=_gguf_muse)  # fmt: skip
_ABSENT_MUSE = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048}

MUSE = {"MuseGlimmerForConditionalGeneration": Family("Muse Glimmer", muse_glimmer, _ABSENT_MUSE, _GGUF_MUSE)}
