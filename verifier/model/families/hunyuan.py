"""HunYuan (dense): heads are normed once they are rotated; a base of the rotary embedding stretched by alpha."""

from __future__ import annotations

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, layer_count, mlp, rms_norm
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, HeadNorm, Layer, Stack
from foresay.verifier.model.rope_config import RopeConfig, read_rope

_NAMES = ("self_attn.query_layernorm", "self_attn.key_layernorm")


def _rope(fields: Fields) -> RopeConfig:
    """Its "dynamic" scaling does not depend on a text's length: theta is multiplied by alpha to the d / (d - 2)."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if scaling is None or scaling.get("alpha") is None:
        return read_rope(fields)
    dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    if dim <= 2:
        raise fields.error(f"head_dim {dim} is too small for a scaling by alpha")
    theta = scaling.optional_number("rope_theta") or fields.number("rope_theta", 10_000.0)
    return RopeConfig(theta * scaling.number("alpha") ** (dim / (dim - 2)))


def hunyuan(fields: Fields) -> Stack:
    """HunYuan V1."""
    norm, has = rms_norm(fields), biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, _rope(fields), biases=has, norm=HeadNorm(norm, after=True, names=_NAMES))
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


_GGUF = Gguf("hunyuan-dense", {"attn_q_norm": _NAMES[0], "attn_k_norm": _NAMES[1]})

FAMILIES = {"HunYuanDenseV1ForCausalLM": Family("HunYuan (dense)", hunyuan, {"rms_norm_eps": 1e-5}, _GGUF)}
