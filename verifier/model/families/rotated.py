"""Families that rotate heads differently from Llama: a part of each, adjacent pairs, or with a stretched base."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    Family,
    Gguf,
    attention,
    biases,
    every,
    layer_count,
    mlp,
    rms_norm,
    window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import HeadNorm, Layer, Norms, Stack
from foresay.verifier.model.products import OUTPUT, QKV, NormKind
from foresay.verifier.model.rope_config import RopeConfig, read_rope

_GLM_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm4(fields: Fields) -> Stack:
    """GLM-4 (0414): norms before and after blocks, half of a head rotated, in adjacent pairs."""
    norm, rope = rms_norm(fields), read_rope(fields, partial=True, interleaved=True)
    own = attention(fields, rope, biases=biases(fields, **{QKV: "attention_bias"}))
    return Stack((Layer(own, mlp(fields, fused=True), norm, _GLM_NORMS),) * layer_count(fields), norm)


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
    rope, inner = read_rope(fields, interleaved=True), mlp(fields)
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = (
        attention(fields, rope if sliding else None, window=window(fields) if sliding else None, biases=has)
        for sliding in every(fields, fields.integer("sliding_window_pattern", 4))
    )
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
    return RopeConfig(theta * scaling.number("alpha") ** (dim / (dim - 2)))


def hunyuan(fields: Fields) -> Stack:
    """HunYuan V1: heads are normalised after they are rotated."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, _stretched(fields), biases=has, norm=HeadNorm(norm, after=True, names=_HEAD_NORMS))
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


_HUNYUAN_GGUF = Gguf("hunyuan-dense", {"attn_q_norm": _HEAD_NORMS[0], "attn_k_norm": _HEAD_NORMS[1]})


def nemotron(fields: Fields) -> Stack:
    """Nemotron-4, Minitron: LayerNorms with biases; half of a head is rotated."""
    norm = NormKind(fields.number("norm_eps", 1e-5), centred=True, bias=True, wide=True, less_one=True)
    return _without_gates(fields, norm, partial=True)


def arcee(fields: Fields) -> Stack:
    """Arcee (AFM): an MLP without gates, with squared ReLU like Nemotron's."""
    return _without_gates(fields, rms_norm(fields), partial=False)


def _without_gates(fields: Fields, norm: NormKind, partial: bool) -> Stack:
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields, partial=partial), biases=has)
    inner = mlp(fields, "relu2", bias=fields.flag("mlp_bias", False))
    return Stack((Layer(own, inner, norm),) * layer_count(fields), norm)


def _of_nemotron(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"norm_eps": fields.number("attention.layer_norm_epsilon")}


FAMILIES = {
    "Glm4ForCausalLM": Family("GLM-4", glm4, _GLM, Gguf("glm4", _GLM_NAMES)),
    "Cohere2ForCausalLM": Family("Command R7B, Command A", cohere2, {"tie_word_embeddings": True}, _COHERE_GGUF),
    "HunYuanDenseV1ForCausalLM": Family("HunYuan (dense)", hunyuan, {"rms_norm_eps": 1e-5}, _HUNYUAN_GGUF),
    "NemotronForCausalLM": Family(
        "Nemotron-4, Minitron", nemotron, {"partial_rotary_factor": 0.5}, Gguf("nemotron", values=_of_nemotron)
    ),
    "ArceeForCausalLM": Family("Arcee AFM", arcee, {"rms_norm_eps": 1e-5}, Gguf("arcee", in_pairs=True)),
}
