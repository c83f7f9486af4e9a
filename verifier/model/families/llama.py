"""Llama, and the families whose layers are Llama's but for biases, norms of heads and windows."""

from __future__ import annotations

from foresay.verifier.model.families.family import (
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
from foresay.verifier.model.nodes import OUTPUT, QKV, HeadNorm, Layer, Stack
from foresay.verifier.model.rope_config import read_rope


def llama(fields: Fields) -> Stack:
    """Llama."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields), biases=has)
    return Stack((Layer(own, mlp(fields, bias=fields.flag("mlp_bias", False)), norm),) * layer_count(fields), norm)


def mistral(fields: Fields) -> Stack:
    """Every layer slides, or none where the window is null. An absent key means the window of v0.1."""
    norm = rms_norm(fields)
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=4096))
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


def window_by_layer(fields: Fields) -> list[int | None]:
    """Off unless use_sliding_window; then layer_types says where, else the layers from max_window_layers on."""
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
    """Seed-OSS: what attention puts out may have a bias of its own."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_out_bias"})
    own = attention(fields, read_rope(fields), biases=has)
    return Stack((Layer(own, mlp(fields, bias=fields.flag("mlp_bias", False)), norm),) * layer_count(fields), norm)


_SEED = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}

FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, Llama 3, SmolLM", llama, gguf=Gguf("llama", in_pairs=True)),
    "MistralForCausalLM": Family(
        "Mistral", mistral, {"num_key_value_heads": 8}, Gguf("llama", in_pairs=True, windowed=True)
    ),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", qwen2, gguf=Gguf("qwen2")),
    "Qwen3ForCausalLM": Family("Qwen3", qwen3, {"head_dim": 128}, Gguf("qwen3")),
    "SeedOssForCausalLM": Family(
        "Seed-OSS", seed_oss, _SEED, Gguf("seed_oss", {"post_attention_norm": "post_attention_layernorm"})
    ),
}
