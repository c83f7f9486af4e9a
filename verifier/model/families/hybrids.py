"""Models whose layers are mostly recurrent, between some with attention: gated delta rules in Qwen3-Next and Qwen3.5,
3.6 and 3.8, where heads of the others have gates; short convolutions in LFM2 and LFM2.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, layer_count, listed, mlp, rms_norm, stack
from foresay.verifier.model.families.moe import OWN_WIDTH, experts, gated, only_sigmoids, shared_names, sparse
from foresay.verifier.model.feed_forward import MLP, Experts, TopKRouter
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Mixer, QKNorm, Stack
from foresay.verifier.model.products import MIXED, RATES, NormKind
from foresay.verifier.model.recurrences import GatedDelta, ShortConv
from foresay.verifier.model.rope_config import read_rope

#: How many numbers kernels process at once.
_LANES = 16


def qwen3_5(fields: Fields) -> Stack:
    """The dense models."""
    return _hybrid(fields, [mlp(fields)] * layer_count(fields))


def qwen3_5_moe(fields: Fields) -> Stack:
    """The mixtures."""
    return _hybrid(fields, [gated(fields)] * layer_count(fields))


def qwen3_next(fields: Fields) -> Stack:
    """Files group the recurrence's inputs by key head; newer GGUF files only its rates."""
    return _hybrid(fields, sparse(fields, gated(fields)), (RATES,) if fields.flag(_APART, False) else (MIXED, RATES))


def _hybrid(fields: Fields, inner: Sequence[MLP | Experts], by_key: tuple[str, ...] = ()) -> Stack:
    """Weights of norms are stored minus one, except those inside the recurrence. inner: of each layer."""
    fields.refuse("attention_bias")
    norm = rms_norm(fields, wide=True, less_one=True)
    gated = fields.flag("attn_output_gate", True)
    rope = read_rope(_with_share(fields), partial=True)
    full = attention(fields, rope, norm=QKNorm(norm), gated=gated, interleaved=gated)
    kinds: dict[str, Mixer] = {"full_attention": full, "linear_attention": _delta(fields, by_key)}
    every = fields.integer("full_attention_interval", 4)
    absent = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layer_count(fields))]
    return stack(fields, [kinds[name] for name in listed(fields, absent, "linear_attention")], inner, norm)


def _with_share(fields: Fields) -> Fields:
    """By default a quarter of each head is rotated."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    given = section is not None and section.get("partial_rotary_factor") is not None
    return fields if given else Fields({"partial_rotary_factor": 0.25, **fields.values}, fields.where)


def _delta(fields: Fields, by_key: tuple[str, ...]) -> GatedDelta:
    if fields.get("output_gate_type") not in (None, "swish", "silu"):
        raise fields.error(f"output_gate_type {fields.get('output_gate_type')!r} is not supported; supported is swish")
    heads = (("linear_num_key_heads", 16), ("linear_num_value_heads", 32))
    widths = (("linear_key_head_dim", 128), ("linear_value_head_dim", 128))
    keys, values, key_dim, value_dim = (fields.integer(*each) for each in (*heads, *widths))
    if values % keys:
        raise fields.error(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    if key_dim % _LANES or value_dim % _LANES:
        raise fields.error(
            f"linear_key_head_dim {key_dim} and linear_value_head_dim {value_dim} must be multiples of 16"
        )
    taps = fields.integer("linear_conv_kernel_dim", 4, minimum=2, most=64)
    inside = rms_norm(fields, wide=True)
    return GatedDelta(keys, values, key_dim, value_dim, taps, inside, fields.flag(_TILED, False), by_key)


_DEFAULTS = {"head_dim": 256, "rms_norm_eps": 1e-6}
#: Only in GGUF files: which value heads share a key; and that Qwen3-Next's rates are a product of their own.
_TILED, _APART = "linear_value_heads_tiled", "linear_rates_apart"


def _of_gguf(fields: Fields, head_dim: int) -> dict[str, Any]:
    recurrent, heads = fields.get("attention.recurrent_layers"), fields.integer("ssm.time_step_rank")
    if not isinstance(recurrent, list | None):
        raise fields.error(f"attention.recurrent_layers must list each layer, got {recurrent!r}")
    kinds = [("full_attention", "linear_attention")[bool(one)] for one in recurrent or ()]
    count = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, minimum=0)
    return {
        "layer_types": kinds[:count] or None,
        "full_attention_interval": fields.integer("full_attention_interval", 4),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": fields.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        _TILED: True,
    }


_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GGUF = Gguf("qwen35", _NAMES, values=_of_gguf)
_SHARED = "mlp.shared_expert"
_MIXTURE_NAMES = {**_NAMES, **shared_names(_SHARED), "ffn_gate_inp_shexp": f"{_SHARED}_gate"}
_MIXTURE_GGUF = Gguf("qwen35moe", _MIXTURE_NAMES, experts=True, shared=True, values=_of_gguf)
_NEXT_GGUF = Gguf(
    "qwen3next",
    {**_MIXTURE_NAMES, "ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
    experts=True,
    shared=True,
    values=lambda fields, head_dim: {**_of_gguf(fields, head_dim), _TILED: False},
)
_MIXTURE = {**_DEFAULTS, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512}

QWEN = {
    "Qwen3_5ForCausalLM": Family("Qwen3.5, Qwen3.6, Qwen3.8 (dense)", qwen3_5, _DEFAULTS, _GGUF),
    "Qwen3_5MoeForCausalLM": Family("Qwen3.5 and Qwen3.6 mixtures", qwen3_5_moe, _MIXTURE, _MIXTURE_GGUF),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", qwen3_next, _MIXTURE, _NEXT_GGUF),
}


def lfm2(fields: Fields) -> Stack:
    """The dense models."""
    inner = mlp(Fields({**fields.values, "intermediate_size": _inner(fields)}, fields.where))
    return _short(fields, [inner] * layer_count(fields))


def lfm2_moe(fields: Fields) -> Stack:
    """The mixtures: their first layers are dense; scores are sigmoids."""
    correction = "feed_forward.expert_bias" if fields.flag("use_expert_bias", True) else None
    normalised, scale = fields.flag("norm_topk_prob", True), fields.number("routed_scaling_factor", 1.0)
    router = TopKRouter("feed_forward.gate", sigmoid=True, correction=correction, norm_topk=normalised, scale=scale)
    inside = experts(fields, router, OWN_WIDTH, modules=_LFM_EXPERTS)
    dense = fields.integer("num_dense_layers", 2, minimum=0)
    return _short(fields, [mlp(fields) if layer < dense else inside for layer in range(layer_count(fields))])


_LFM_EXPERTS = ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3", "feed_forward.experts.{}.w2")


def _short(fields: Fields, inner: Sequence[MLP | Experts]) -> Stack:
    """Heads are normalised before they are rotated; convolutions have no biases. inner: of each layer."""
    fields.refuse("conv_bias")
    norm, hidden = NormKind(fields.number("norm_eps", 1e-5)), fields.integer("hidden_size")
    if hidden % _LANES:
        raise fields.error(f"hidden_size {hidden} must be a multiple of {_LANES}")
    full = attention(fields, read_rope(fields), norm=QKNorm(norm))
    short = ShortConv(hidden, fields.integer("conv_L_cache", 3, minimum=2, most=64))
    kinds: dict[str, Mixer] = {"full_attention": full, "conv": short}
    attends, layers = fields.get("full_attn_idxs"), range(layer_count(fields))
    absent = ["full_attention" if attends is None or layer in attends else "conv" for layer in layers]
    return stack(fields, [kinds[name] for name in listed(fields, absent, "conv")], inner, norm)


def _inner(fields: Fields) -> int:
    """The inner width: two thirds of the given one, times a number, rounded up to a multiple of another, unless it is
    final."""
    inner = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)) // multiple) * multiple


def _of_lfm(fields: Fields, head_dim: int) -> dict[str, Any]:
    heads = fields.get("attention.head_count_kv")
    kinds = [("conv", "full_attention")[bool(each)] for each in heads] if isinstance(heads, list) else None
    return {
        "layer_types": kinds,
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


_LFM_NAMES = {
    "token_embd_norm.weight": "model.norm.weight",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
#: transformers omits ``tie_word_embeddings`` if it is true.
_LFM_ABSENT = {"tie_word_embeddings": True, "rope_theta": 1e6}

_LFM_MOE_ABSENT = {**_LFM_ABSENT, "num_experts_per_tok": 4}
_LFM_MOE_NAMES = {**_LFM_NAMES, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"}


def _of_lfm_moe(fields: Fields, head_dim: int) -> dict[str, Any]:
    dense = fields.integer("leading_dense_block_count", 0, minimum=0)
    return {**_of_lfm(fields, head_dim), **only_sigmoids(fields), "num_dense_layers": dense}


_LFM_MOE_GGUF = Gguf("lfm2moe", _LFM_MOE_NAMES, experts=True, values=_of_lfm_moe)

LFM = {
    "Lfm2ForCausalLM": Family("LFM2, LFM2.5 (dense)", lfm2, _LFM_ABSENT, Gguf("lfm2", _LFM_NAMES, values=_of_lfm)),
    "Lfm2MoeForCausalLM": Family("LFM2, LFM2.5 (mixtures)", lfm2_moe, _LFM_MOE_ABSENT, _LFM_MOE_GGUF),
}
