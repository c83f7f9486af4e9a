"""Llama, and families whose layers differ from it in biases, norms of heads, windows, fused matrices or positions."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    FUSED_QKV,
    Family,
    Gguf,
    attention,
    biases,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    uniform_window,
    window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import HeadNorm, Layer, Stack
from foresay.verifier.model.products import OUTPUT, QKV
from foresay.verifier.model.rope_config import QueryScaling, read_rope


def llama(fields: Fields) -> Stack:
    """Llama."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields), biases=has)
    return Stack((Layer(own, mlp(fields, bias=fields.flag("mlp_bias", False)), norm),) * layer_count(fields), norm)


def mistral(fields: Fields) -> Stack:
    """Every layer has a sliding window, or none if it is null. An absent key means the window of v0.1."""
    norm = rms_norm(fields)
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=4096))
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


def window_by_layer(fields: Fields) -> list[int | None]:
    """Off unless use_sliding_window; then the layers in layer_types have windows, else those from max_window_layers
    on."""
    layers = layer_count(fields)
    enabled = fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None
    first = fields.integer("max_window_layers", 28, minimum=0) if enabled else layers
    slides = layer_types(fields) or tuple(layer >= first for layer in range(layers))
    if any(slides) and not enabled:
        raise fields.error("layer_types has sliding layers, but use_sliding_window and sliding_window name no window")
    return [window(fields) if sliding else None for sliding in slides]


def qwen2(fields: Fields) -> Stack:
    """Qwen 2: biases of queries, keys and values."""
    norm, rope, inner = rms_norm(fields), read_rope(fields), mlp(fields)
    own = (attention(fields, rope, window=seen, biases=(QKV,)) for seen in window_by_layer(fields))
    return Stack(tuple(Layer(each, inner, norm) for each in own), norm)


def qwen3(fields: Fields) -> Stack:
    """Qwen 3: norms of heads."""
    norm, rope, inner = rms_norm(fields), read_rope(fields), mlp(fields)
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = (attention(fields, rope, window=seen, biases=has, norm=HeadNorm(norm)) for seen in window_by_layer(fields))
    return Stack(tuple(Layer(each, inner, norm) for each in own), norm)


def seed_oss(fields: Fields) -> Stack:
    """Seed-OSS: the attention's output product may have its own bias."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_out_bias"})
    own = attention(fields, read_rope(fields), biases=has)
    return Stack((Layer(own, mlp(fields, bias=fields.flag("mlp_bias", False)), norm),) * layer_count(fields), norm)


_SEED = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}


def ministral3(fields: Fields) -> Stack:
    """Mistral's layers, whose queries are scaled by position, with ``llama_4_scaling_beta``."""
    norm, rope = rms_norm(fields), fields.section("rope_parameters") or fields
    beta = rope.optional_number("llama_4_scaling_beta")
    scale = None if beta is None else QueryScaling(beta, rope.integer("original_max_position_embeddings"))
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=None), query_scaling=scale)
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


def _query_scale(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"rope_parameters": {"llama_4_scaling_beta": fields.optional_number("attention.temperature_scale")}}


_MINISTRAL = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}

_MINISTRAL_GGUF = Gguf("mistral3", in_pairs=True, values=_query_scale)


def phi3(fields: Fields) -> Stack:
    """Phi-3 and Phi-4: fused matrices, partial rotary embedding, LongRoPE."""
    norm, rope = rms_norm(fields), read_rope(fields, partial=True)
    own = attention(fields, rope, window=uniform_window(fields, absent=None), fused=FUSED_QKV)
    return Stack((Layer(own, mlp(fields, fused=True), norm),) * layer_count(fields), norm)


_PHI_GGUF = Gguf("phi3", {"attn_qkv": FUSED_QKV, "ffn_up": FUSED_GATE_UP}, windowed=True)


def _rotated(fields: Fields) -> list[bool]:
    """``no_rope_layers`` has a 1 for each layer with a rotary embedding; if absent, every fourth layer has none."""
    marks, layers = fields.get("no_rope_layers"), layer_count(fields)
    if marks is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers or not set(marks) <= {0, 1}:
        raise fields.error(f"no_rope_layers must list 0 or 1 for each of {layers} layers, got {marks!r}")
    return list(map(bool, marks))


def smollm3(fields: Fields) -> Stack:
    """SmolLM3: some layers have no rotary embedding."""
    norm, rope, inner = rms_norm(fields), read_rope(fields), mlp(fields, bias=fields.flag("mlp_bias", False))
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = (
        attention(fields, rope if rotated else None, window=seen, biases=has)
        for rotated, seen in zip(_rotated(fields), window_by_layer(fields), strict=True)
    )
    return Stack(tuple(Layer(each, inner, norm) for each in own), norm)


#: Mixtral's GGUF files have Llama's architecture name.
MIXTRAL_ROUTER = "block_sparse_moe.gate"

FAMILIES = {
    "LlamaForCausalLM": Family(
        "Llama 2, Llama 3, SmolLM", llama, gguf=Gguf("llama", {"ffn_gate_inp": MIXTRAL_ROUTER}, in_pairs=True)
    ),
    "MistralForCausalLM": Family(
        "Mistral", mistral, {"num_key_value_heads": 8}, Gguf("llama", in_pairs=True, windowed=True)
    ),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", qwen2, gguf=Gguf("qwen2")),
    "MiMoForCausalLM": Family("MiMo (7B)", qwen2),
    "Qwen3ForCausalLM": Family("Qwen3", qwen3, {"head_dim": 128}, Gguf("qwen3")),
    "SeedOssForCausalLM": Family(
        "Seed-OSS", seed_oss, _SEED, Gguf("seed_oss", {"post_attention_norm": "post_attention_layernorm"})
    ),
    "Ministral3ForCausalLM": Family("Ministral 3, Devstral 2", ministral3, _MINISTRAL, _MINISTRAL_GGUF),
    "Phi3ForCausalLM": Family("Phi-3, Phi-4", phi3, gguf=_PHI_GGUF),
    "SmolLM3ForCausalLM": Family("SmolLM3", smollm3, {"num_key_value_heads": 4}, Gguf("smollm3", in_pairs=True)),
}
