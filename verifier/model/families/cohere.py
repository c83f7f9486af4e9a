"""Command R7B and Command A (Cohere 2): attention and MLP in parallel after one norm, by the standard deviation."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, every, mlp, window
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, Layer, NormKind, Norms, Stack
from foresay.verifier.model.rope_config import read_rope


def cohere2(fields: Fields) -> Stack:
    """Three layers of four slide; those that do not have no positions."""
    norm = NormKind(fields.number("layer_norm_eps", 1e-5), centred=True, wide=True)
    rope, inner = read_rope(fields, interleaved=True), mlp(fields)
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = (
        attention(fields, rope if sliding else None, window=window(fields) if sliding else None, biases=has)
        for sliding in every(fields, fields.integer("sliding_window_pattern", 4))
    )
    layers = tuple(Layer(each, inner, norm, Norms("input_layernorm"), parallel=True) for each in own)
    return Stack(layers, norm, logit_scale=fields.number("logit_scale", 0.0625))


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "logit_scale": fields.number("logit_scale"),
    }


_GGUF = Gguf("cohere2", windowed=True, values=_gguf_values)

FAMILIES = {"Cohere2ForCausalLM": Family("Command R7B, Command A", cohere2, {"tie_word_embeddings": True}, _GGUF)}
