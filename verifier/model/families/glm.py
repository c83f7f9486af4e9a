"""GLM-4: norms on both sides, half of a head rotated, in pairs that lie side by side."""

from __future__ import annotations

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    Family,
    Gguf,
    attention,
    biases,
    layer_count,
    mlp,
    rms_norm,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import QKV, Layer, Norms, Stack
from foresay.verifier.model.rope_config import read_rope

_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm4(fields: Fields) -> Stack:
    """GLM-4 (0414)."""
    norm, rope = rms_norm(fields), read_rope(fields, partial=True, interleaved=True)
    own = attention(fields, rope, biases=biases(fields, **{QKV: "attention_bias"}))
    return Stack((Layer(own, mlp(fields, fused=True), norm, _NORMS),) * layer_count(fields), norm)


_ABSENT = {
    "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": FUSED_GATE_UP,
}

FAMILIES = {"Glm4ForCausalLM": Family("GLM-4", glm4, _ABSENT, Gguf("glm4", _NAMES))}
