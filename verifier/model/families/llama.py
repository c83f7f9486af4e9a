"""Llama, and dense families whose layers differ from it in biases, norms of heads, windows, fused matrices or factors,
and in how heads are rotated: a part of each, adjacent pairs, or with a stretched base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    FUSED_QKV,
    Family,
    Gguf,
    attention,
    attentions,
    biased,
    biases,
    every,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    ropes_by_theta,
    stack,
    uniform_window,
    window,
)
from foresay.verifier.model.feed_forward import MLP, Experts
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Attention, Layer, Mixer, Norms, QKNorm, Stack
from foresay.verifier.model.portable_math import power
from foresay.verifier.model.products import OUTPUT, QKV, NormKind
from foresay.verifier.model.rope_config import QueryScaling, RopeConfig, read_rope


def _mlp(fields: Fields) -> MLP:
    return mlp(fields, bias=fields.flag("mlp_bias", False))


def llama(fields: Fields) -> Stack:
    """Llama."""
    own = attention(fields, read_rope(fields), biases=biased(fields))
    return stack(fields, own, _mlp(fields), rms_norm(fields))


def mistral(fields: Fields) -> Stack:
    """Every layer has a sliding window, or none if it is null. An absent key means the window of v0.1."""
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=4096))
    return stack(fields, own, mlp(fields), rms_norm(fields))


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
    return stack(fields, qwen2_attentions(fields), mlp(fields), rms_norm(fields))


def qwen2_attentions(fields: Fields) -> list[Attention]:
    """The attention of each of its layers."""
    rope = read_rope(fields)
    return [attention(fields, rope, window=seen, biases=(QKV,)) for seen in window_by_layer(fields)]


def qwen3(fields: Fields) -> Stack:
    """Qwen 3: norms of heads."""
    return stack(fields, qwen3_attentions(fields), mlp(fields), rms_norm(fields))


def qwen3_attentions(fields: Fields) -> list[Attention]:
    """The attention of each of its layers."""
    rope, more = read_rope(fields), {"biases": biased(fields), "norm": QKNorm(rms_norm(fields))}
    return [attention(fields, rope, window=seen, **more) for seen in window_by_layer(fields)]


def seed_oss(fields: Fields) -> Stack:
    """Seed-OSS: the attention's output product may have its own bias."""
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_out_bias"})
    return stack(fields, attention(fields, read_rope(fields), biases=has), _mlp(fields), rms_norm(fields))


_SEED = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}


def ministral3(fields: Fields) -> Stack:
    """Mistral's layers, whose queries are scaled by position, with ``llama_4_scaling_beta``."""
    rope = fields.section("rope_parameters") or fields
    beta = rope.optional_number("llama_4_scaling_beta")
    scale = None if beta is None else QueryScaling(beta, rope.integer("original_max_position_embeddings"))
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=None), query_scaling=scale)
    return stack(fields, own, mlp(fields), rms_norm(fields))


def _query_scale(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"rope_parameters": {"llama_4_scaling_beta": fields.optional_number("attention.temperature_scale")}}


_MINISTRAL = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}

_MINISTRAL_GGUF = Gguf("mistral3", in_pairs=True, values=_query_scale)


def phi3(fields: Fields) -> Stack:
    """Phi-3 and Phi-4: fused matrices, partial rotary embedding, LongRoPE."""
    rope = read_rope(fields, partial=True)
    own = attention(fields, rope, window=uniform_window(fields, absent=None), fused=FUSED_QKV)
    return stack(fields, own, mlp(fields, fused=True), rms_norm(fields))


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
    rope, has = read_rope(fields), biased(fields)
    own = [
        attention(fields, rope if rotated else None, window=seen, biases=has)
        for rotated, seen in zip(_rotated(fields), window_by_layer(fields), strict=True)
    ]
    return stack(fields, own, _mlp(fields), rms_norm(fields))


#: Mixtral's GGUF files have Llama's architecture name.
MIXTRAL_ROUTER = "block_sparse_moe.gate"

LLAMA = {
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

# -- multiplied by numbers of config.json ------------------------------------------------------------------------------


def granite(fields: Fields) -> Stack:
    """Granite 3 and 4.1 (dense): embeddings, branches, scores and logits are multiplied."""
    return granite_stack(fields, _mlp(fields))


def granite_stack(fields: Fields, inner: MLP | Experts, own: Sequence[Mixer] = ()) -> Stack:
    """Layers of attention, or of the mixers in ``own``, each followed by ``inner``."""
    norm, share = rms_norm(fields), fields.number("residual_multiplier", 1.0)
    own = own or [granite_attention(fields, read_rope(fields))] * layer_count(fields)
    return Stack(
        tuple(Layer(each, inner, norm, residual_mul=share) for each in own),
        norm,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def granite_swa(fields: Fields) -> Stack:
    """Granite with windows: heads have sinks, and every fourth layer, including the first, has full attention."""
    slides = layer_types(fields) or tuple(layer % 4 != 0 for layer in range(layer_count(fields)))
    ropes = ropes_by_theta(fields, (True,) * len(slides))
    seen = [fields.integer("sliding_window", 128) if sliding else None for sliding in slides]
    own = (granite_attention(fields, rope, window=each, sinks=True) for rope, each in zip(ropes, seen, strict=True))
    return granite_stack(fields, _mlp(fields), list(own))


def granite_attention(fields: Fields, rope: RopeConfig | None, **more: Any) -> Attention:
    """Attention with the score multiplier of config.json."""
    scale = fields.number("attention_multiplier", 1.0)
    return attention(fields, rope, scale=scale, biases=biased(fields), **more)


def granite_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The multipliers in its GGUF files."""
    return {
        "attention_multiplier": fields.optional_number("attention.scale") or 1 / math.sqrt(head_dim),
        "residual_multiplier": fields.optional_number("residual_scale"),
        "embedding_multiplier": fields.optional_number("embedding_scale"),
        "logits_scaling": fields.optional_number("logit_scale"),
    }


_GRANITE_GGUF = Gguf("granite", in_pairs=True, values=granite_values)
_GRANITE_SWA = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}

GRANITE = {
    "GraniteForCausalLM": Family("Granite 3, Granite 4.1", granite, gguf=_GRANITE_GGUF),
    "GraniteSWAForCausalLM": Family("Granite SWA", granite_swa, _GRANITE_SWA),
}

# -- rotated differently -----------------------------------------------------------------------------------------------

_GLM_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm4(fields: Fields) -> Stack:
    """GLM-4 (0414): norms before and after blocks, half of a head rotated, in adjacent pairs."""
    rope = read_rope(fields, partial=True, interleaved=True)
    own = attention(fields, rope, biases=biases(fields, **{QKV: "attention_bias"}))
    return stack(fields, own, mlp(fields, fused=True), rms_norm(fields), _GLM_NORMS)


_GLM = {
    "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_GLM_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": FUSED_GATE_UP,
}


def cohere2(fields: Fields) -> Stack:
    """Cohere 2: attention and MLP in parallel after one LayerNorm; three of four layers have a sliding window, the
    others have no rotary embedding."""
    norm = NormKind(fields.number("layer_norm_eps", 1e-5), centred=True, wide=True)
    slides, inner = every(fields, fields.integer("sliding_window_pattern", 4)), mlp(fields)
    own = attentions(fields, slides, (None, read_rope(fields, interleaved=True)), biases=biased(fields))
    layers = tuple(Layer(each, inner, norm, Norms("input_layernorm"), parallel=True) for each in own)
    return Stack(layers, norm, logit_scale=fields.number("logit_scale", 0.0625))


def _of_cohere(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "logit_scale": fields.number("logit_scale"),
    }


_COHERE_GGUF = Gguf("cohere2", windowed=True, values=_of_cohere)


_HEAD_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")


def _stretched(fields: Fields) -> RopeConfig:
    """Its "dynamic" scaling does not depend on the length: theta is multiplied by alpha to the d / (d - 2)."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if scaling is None or scaling.get("alpha") is None:
        return read_rope(fields)
    dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    if dim <= 2:
        raise fields.error(f"head_dim {dim} is too small for a scaling by alpha")
    theta = scaling.optional_number("rope_theta") or fields.number("rope_theta", 10_000.0)
    return RopeConfig(theta * power(scaling.number("alpha"), dim / (dim - 2)))


def hunyuan(fields: Fields) -> Stack:
    """HunYuan V1: heads are normalised after they are rotated."""
    norm = rms_norm(fields)
    of_heads = QKNorm(norm, after=True, names=_HEAD_NORMS)
    return stack(fields, attention(fields, _stretched(fields), biases=biased(fields), norm=of_heads), mlp(fields), norm)


_HUNYUAN_GGUF = Gguf("hunyuan-dense", {"attn_q_norm": _HEAD_NORMS[0], "attn_k_norm": _HEAD_NORMS[1]})


def nemotron(fields: Fields) -> Stack:
    """Nemotron-4, Minitron: LayerNorms with biases; half of a head is rotated."""
    norm = NormKind(fields.number("norm_eps", 1e-5), centred=True, bias=True, wide=True, less_one=True)
    return _without_gates(fields, norm, partial=True)


def arcee(fields: Fields) -> Stack:
    """Arcee (AFM): an MLP without gates, with squared ReLU like Nemotron's."""
    return _without_gates(fields, rms_norm(fields), partial=False)


def _without_gates(fields: Fields, norm: NormKind, partial: bool) -> Stack:
    own = attention(fields, read_rope(fields, partial=partial), biases=biased(fields))
    return stack(fields, own, mlp(fields, "relu2", bias=fields.flag("mlp_bias", False)), norm)


def _of_nemotron(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"norm_eps": fields.number("attention.layer_norm_epsilon")}


ROTATED = {
    "Glm4ForCausalLM": Family("GLM-4", glm4, _GLM, Gguf("glm4", _GLM_NAMES)),
    "Cohere2ForCausalLM": Family("Command R7B, Command A", cohere2, {"tie_word_embeddings": True}, _COHERE_GGUF),
    "HunYuanDenseV1ForCausalLM": Family("HunYuan (dense)", hunyuan, {"rms_norm_eps": 1e-5}, _HUNYUAN_GGUF),
    "NemotronForCausalLM": Family(
        "Nemotron-4, Minitron", nemotron, {"partial_rotary_factor": 0.5}, Gguf("nemotron", values=_of_nemotron)
    ),
    "ArceeForCausalLM": Family("Arcee AFM", arcee, {"rms_norm_eps": 1e-5}, Gguf("arcee", in_pairs=True)),
}
