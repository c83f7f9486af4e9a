"""Mixtures of experts: each row goes through a few of a layer's MLPs. Also DeepSeek's, which have latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foresay.verifier.model.families.family import (
    Family,
    Gguf,
    attention,
    attentions,
    biased,
    biases,
    every,
    layer_count,
    mlp,
    rms_norm,
    stack,
    uniform_window,
)
from foresay.verifier.model.families.llama import (
    MIXTRAL_ROUTER,
    granite_stack,
    granite_values,
    qwen2_attentions,
    qwen3_attentions,
)
from foresay.verifier.model.feed_forward import GGUF_STACKS, MLP, Experts, TopKRouter
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import SINKS, QKNorm, Stack
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.products import DOWN, GATE_UP, QKV, NormKind, Stacked
from foresay.verifier.model.rope_config import YarnScaling, read_rope

#: config.json's names of the number of experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: The width of an expert if dense layers have another.
OWN_WIDTH = "moe_intermediate_size"
#: The correction of DeepSeek's router, and the module of its shared experts.
_CORRECTION, SHARED = "mlp.gate.e_score_correction_bias", "mlp.shared_experts"
#: More than any model has: each has its own tensor names.
_MOST_EXPERTS = 4096


def experts(
    fields: Fields,
    router: TopKRouter,
    width: str = "intermediate_size",
    one: MLP | None = None,
    each: str = "num_experts_per_tok",
    **more: Any,
) -> Experts:
    """The experts as in most config.json files, with the fields in ``more``. width: the key of the width of each. one:
    each of them, if not as in most files. each: the key of how many a row goes to."""
    key = next((name for name in _COUNTS if fields.get(name) is not None), _COUNTS[0])
    count = fields.integer(key, most=_MOST_EXPERTS)
    chosen = fields.integer(each, most=count)
    _check_groups(fields, router, count, chosen)
    one = one or mlp(fields, width=width)
    return Experts(count, chosen, one.inner, router, **{"activation": one.activation, **more})


def _check_groups(fields: Fields, router: TopKRouter, count: int, chosen: int) -> None:
    """Check that all groups have as many experts, enough to be ranked, and those considered enough to choose from."""
    groups, best = router.groups
    if count % groups:
        raise fields.error(f"n_group {groups} does not divide the number of experts")
    if groups > 1 and router.sigmoid and count == groups:
        raise fields.error(f"n_group {groups} leaves one expert in a group, which is ranked by its best two")
    if not chosen <= count // groups * best <= count:
        raise fields.error(f"topk_group {best} of n_group {groups} is not supported with {chosen} of {count} experts")


def sparse(fields: Fields, inside: Experts) -> list[MLP | Experts]:
    """For each layer: all have experts except those excluded by ``mlp_only_layers`` and ``decoder_sparse_step``."""
    layers, step = layer_count(fields), fields.integer("decoder_sparse_step", 1)
    dense, only = mlp(fields), fields.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise fields.error(f"mlp_only_layers must be a list of layers, got {only!r}")
    return [inside if layer not in only and not (layer + 1) % step else dense for layer in range(layers)]


def gated(fields: Fields, normalised: bool = True) -> Experts:
    """The experts, with a shared one that has a gate. normalised: what an absent ``norm_topk_prob`` means."""
    shared = MLP(fields.integer("shared_expert_intermediate_size"))
    router = TopKRouter(norm_topk=fields.flag("norm_topk_prob", normalised))
    return experts(fields, router, OWN_WIDTH, shared=shared, shared_gate="mlp.shared_expert_gate")


def qwen2_moe(fields: Fields) -> Stack:
    """Qwen 2's attention, with experts."""
    if not fields.flag("qkv_bias", True):
        raise fields.error("qkv_bias false is not supported: queries, keys and values have biases")
    return stack(fields, qwen2_attentions(fields), sparse(fields, gated(fields, False)), rms_norm(fields))


def qwen3_moe(fields: Fields) -> Stack:
    """Qwen 3's attention, with experts."""
    inside = experts(fields, TopKRouter(norm_topk=fields.flag("norm_topk_prob", False)), OWN_WIDTH)
    return stack(fields, qwen3_attentions(fields), sparse(fields, inside), rms_norm(fields))


def olmoe(fields: Fields) -> Stack:
    """OLMoE: queries and keys are normalised over all heads."""
    fields.refuse("clip_qkv")
    norm = rms_norm(fields)
    own = attention(fields, read_rope(fields), biases=biased(fields), norm=QKNorm(norm, whole=True))
    return stack(fields, own, experts(fields, TopKRouter(norm_topk=fields.flag("norm_topk_prob", False))), norm)


_MIXTRAL_EXPERTS = tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))


def mixtral(fields: Fields) -> Stack:
    """Mixtral: Mistral's attention."""
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=None))
    return stack(fields, own, experts(fields, TopKRouter(MIXTRAL_ROUTER), modules=_MIXTRAL_EXPERTS), rms_norm(fields))


#: Added for the choice of MiniMax-M2's experts.
_MINIMAX_CORRECTION = "block_sparse_moe.e_score_correction_bias"


def minimax_m2(fields: Fields) -> Stack:
    """MiniMax-M2: queries and keys are normalised over all heads, which are rotated in part; scores are sigmoids."""
    norm, turning = rms_norm(fields), fields.get("rotary_dim")
    if turning is not None:
        share = fields.integer("rotary_dim") / fields.integer("head_dim")
        fields = Fields({"partial_rotary_factor": share, **fields.values}, fields.where)
    own = attention(fields, read_rope(fields, partial=True), norm=QKNorm(norm, whole=True))
    router = TopKRouter(MIXTRAL_ROUTER, sigmoid=True, correction=_MINIMAX_CORRECTION)
    return stack(fields, own, experts(fields, router, modules=_MIXTRAL_EXPERTS), norm)


GRANITE_ROUTER = "block_sparse_moe.router.layer"
GRANITE_STACKS: Mapping[str, tuple[Stacked, ...]] = {
    name: (Stacked(f"block_sparse_moe.{theirs}.weight", turns), *GGUF_STACKS[name])
    for name, theirs, turns in ((GATE_UP, "input_linear", (0, 1)), (DOWN, "output_linear", (0,)))
}


def granite_moe(fields: Fields) -> Stack:
    """Granite 3's mixtures."""
    return granite_stack(fields, experts(fields, TopKRouter(GRANITE_ROUTER), stacked=GRANITE_STACKS))


def glm4_moe(fields: Fields) -> Stack:
    """GLM-4.5: the first layers are dense, scores are sigmoids, one expert is shared."""
    norm, router = rms_norm(fields), corrected(fields)
    qk = QKNorm(norm) if fields.flag("use_qk_norm", False) else None
    has = biases(fields, **{QKV: "attention_bias"})
    own = attention(fields, read_rope(fields, partial=True), biases=has, norm=qk)
    inside = experts(fields, router, OWN_WIDTH, shared=shared(fields), shared_module=SHARED)
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return stack(fields, own, [mlp(fields) if layer < dense else inside for layer in range(layer_count(fields))], norm)


def corrected(fields: Fields) -> TopKRouter:
    """DeepSeek's router: scores are sigmoids, with a correction added for the choice."""
    return TopKRouter(
        sigmoid=True,
        correction=_CORRECTION,
        groups=(fields.integer("n_group", 1), fields.integer("topk_group", 1)),
        norm_topk=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def shared(fields: Fields) -> MLP | None:
    """The MLP that stands for all shared experts."""
    count = fields.integer("n_shared_experts", 1, minimum=0)
    return MLP(fields.integer(OWN_WIDTH) * count) if count else None


_OSS_STACKS: Mapping[str, tuple[Stacked, ...]] = {
    name: (
        Stacked(f"mlp.experts.{theirs}", turns, transposed=True, interleaved=len(turns) > 1),
        Stacked(f"mlp.experts.{theirs}_bias", turns, interleaved=len(turns) > 1, holds="bias"),
        Stacked(f"mlp.experts.{theirs}_blocks", turns, interleaved=len(turns) > 1, holds="blocks"),
        Stacked(f"mlp.experts.{theirs}_scales", turns, interleaved=len(turns) > 1, holds="scales"),
        *GGUF_STACKS[name],
    )
    for name, theirs, turns in ((GATE_UP, "gate_up_proj", (0, 1)), (DOWN, "down_proj", (0,)))
}


def gpt_oss(fields: Fields) -> Stack:
    """gpt-oss: sinks, alternating sliding-window layers, biases everywhere, gates clamped at 7."""
    if (limits := (fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702))) != (7.0, 1.702):
        raise fields.error(f"swiglu_limit and swiglu_alpha {limits} are not supported; supported: 7, 1.702")
    inside = experts(fields, TopKRouter("mlp.router", bias=True), activation="clamped", bias=True, stacked=_OSS_STACKS)
    own = attentions(fields, every(fields, 2), (read_rope(fields),) * 2, biases=biased(fields), sinks=True)
    return stack(fields, own, inside, rms_norm(fields, wide=True))


_QWEN = {"head_dim": 128, "num_key_value_heads": 4, "num_experts_per_tok": 8}
_QWEN2 = {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}
_MIXTRAL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2}
_GLM = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_experts_per_tok": 8}
_OSS = {
    "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
    "num_experts_per_tok": 4, "rope_theta": 150_000.0,
}  # fmt: skip

_MINIMAX = {"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8, "rope_theta": 5e6}

_QWEN_GGUF = Gguf("qwen3moe", experts=True, values=lambda fields, head_dim: {"norm_topk_prob": True})
_OSS_NAMES = {
    "attn_sinks.weight": SINKS, "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_OSS_GGUF = Gguf(
    "gpt-oss", _OSS_NAMES, windowed=True, experts=True, values=lambda *_: {"rope_parameters": {"truncate": False}}
)


def glm_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    """What GGUF files of mixtures with DeepSeek's router leave out."""
    return {
        **only_sigmoids(fields),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
        "n_shared_experts": fields.integer("expert_shared_count", 0, minimum=0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        **groups_of(fields),
    }


def only_sigmoids(fields: Fields) -> dict[str, Any]:
    """Raises ConfigError if experts are not chosen by sigmoids; no values."""
    if fields.integer("expert_gating_func", 2) != 2:
        raise fields.error("expert_gating_func: only sigmoids (2) are supported for this architecture")
    return {}


def groups_of(fields: Fields) -> dict[str, int]:
    """The groups of experts of a GGUF file."""
    keys = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {ours: fields.integer(theirs, 0, minimum=0) or 1 for ours, theirs in keys.items()}


def shared_names(module: str) -> dict[str, str]:
    """The names of a shared expert's matrices in GGUF files, and here, in this module."""
    return {f"ffn_{name}_shexp": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


#: GGUF's names of the parts of mixtures with DeepSeek's router; and the module of their shared experts.
CORRECTED_NAMES = {"exp_probs_b.bias": _CORRECTION, **shared_names(SHARED)}
_GLM_NAMES = {"post_attention_norm": "post_attention_layernorm", **CORRECTED_NAMES}
_GLM_GGUF = Gguf("glm4moe", _GLM_NAMES, experts=True, shared=True, values=glm_values)
_MINIMAX_NAMES = {"ffn_gate_inp": MIXTRAL_ROUTER, "exp_probs_b.bias": _MINIMAX_CORRECTION}
_MINIMAX_GGUF = Gguf("minimax-m2", _MINIMAX_NAMES, experts=True, values=lambda fields, head_dim: only_sigmoids(fields))
_GRANITE_GGUF = Gguf("granitemoe", {"ffn_gate_inp": GRANITE_ROUTER}, True, experts=True, values=granite_values)

MIXTURES = {
    "Qwen2MoeForCausalLM": Family("Qwen1.5 and Qwen2 mixtures", qwen2_moe, _QWEN2),
    "Qwen3MoeForCausalLM": Family("Qwen3 and Qwen3-Coder mixtures", qwen3_moe, _QWEN, _QWEN_GGUF),
    "OlmoeForCausalLM": Family("OLMoE", olmoe, _OLMOE, Gguf("olmoe", experts=True)),
    "MixtralForCausalLM": Family("Mixtral", mixtral, _MIXTRAL, Gguf("llama", in_pairs=True, experts=True)),
    "GraniteMoeForCausalLM": Family("Granite 3 mixtures", granite_moe, {"num_experts_per_tok": 2}, _GRANITE_GGUF),
    "Glm4MoeForCausalLM": Family("GLM-4.5, GLM-4.6, GLM-4.7", glm4_moe, _GLM, _GLM_GGUF),
    "GptOssForCausalLM": Family("gpt-oss", gpt_oss, _OSS, _OSS_GGUF),
    "MiniMaxM2ForCausalLM": Family("MiniMax-M2", minimax_m2, _MINIMAX, _MINIMAX_GGUF),
}


# -- multi-head latent attention: DeepSeek's families, and those with its layers ---------------------------------------

#: V2's way of choosing experts from the best groups.
_IN_GROUPS = "group_limited_greedy"


def _latent(fields: Fields) -> MLA:
    fields.refuse("attention_bias")
    rope = read_rope(fields, interleaved=fields.flag("rope_interleave", True))
    latent, plain, turning, value = (
        fields.integer(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if turning % 2:
        raise fields.error(f"qk_rope_head_dim {turning} is odd; the rotary embedding needs pairs")
    scale = 1 / math.sqrt(plain + turning)
    match rope.parameters:
        case YarnScaling(mscale_all_dim=share) as yarn if share is not None:
            scale *= yarn.mscale_of(share) ** 2
    rank = None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank")
    return MLA(
        fields.integer("num_attention_heads"), 1, latent + turning, scale, rope, kv_lora_rank=latent, nope_dim=plain,
        v_head_dim=value, q_lora_rank=rank, inner_norm=NormKind(),
    )  # fmt: skip


def deepseek(fields: Fields) -> Stack:
    """DeepSeek's layers: one or several experts are shared."""
    fields.refuse("mlp_bias")
    inside = experts(fields, _router(fields), OWN_WIDTH, shared=shared(fields), shared_module=SHARED)
    inner = [mlp(fields) if dense else inside for dense in _dense(fields)]
    return stack(fields, _latent(fields), inner, rms_norm(fields))


def _router(fields: Fields) -> TopKRouter:
    """Scores are sigmoids with a correction for the choice, or, in V2, a softmax of all."""
    scoring, method, softmax = fields.get("scoring_func"), fields.get("topk_method"), ("greedy", _IN_GROUPS)
    if scoring not in (None, "sigmoid", "softmax"):
        raise fields.error(f"scoring_func {scoring!r} is not supported; supported: sigmoid, softmax")
    methods = softmax if scoring == "softmax" else ("greedy", "noaux_tc")
    if method not in (None, *methods):
        raise fields.error(f"topk_method {method!r} is not supported; supported: {', '.join(methods)}")
    router = corrected(fields)
    if scoring != "softmax":
        return router
    groups = router.groups if method == _IN_GROUPS else (1, 1)
    return TopKRouter(groups=groups, norm_topk=fields.flag("norm_topk_prob", False), scale=router.scale)


def _dense(fields: Fields) -> list[bool]:
    """Which layers have no experts: the first ones, or as ``mlp_layer_types`` says."""
    layers, kinds = layer_count(fields), fields.get("mlp_layer_types")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq other than 1 is not supported")
    if kinds is None:
        first = fields.integer("first_k_dense_replace", 0, minimum=0)
        kinds = ["dense" if layer < first else "sparse" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(one in ("dense", "sparse") for one in kinds):
        raise fields.error(f"mlp_layer_types must list dense or sparse for each of {layers} layers, got {kinds!r}")
    return [kind == "dense" for kind in kinds]


_V2 = {"scoring_func": "softmax", "n_shared_experts": 2}
_V3 = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
_FLASH = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}


def _latent_values(fields: Fields, turning: int) -> dict[str, Any]:
    """Files of the architecture may be of any of these models. turning: the rotated numbers of a head."""
    length, share = fields.integer("attention.key_length_mla"), fields.get("rope.scaling.yarn_log_multiplier")
    softmax = fields.integer("expert_gating_func", 1, minimum=0) < 2
    return {
        **glm_values(Fields({**fields.values, "expert_gating_func": 2}, fields.where), turning),
        **({"scoring_func": "softmax", "topk_method": _IN_GROUPS} if softmax else {"scoring_func": "sigmoid"}),
        "q_lora_rank": fields.get("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": length - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": fields.integer("attention.value_length_mla"),
        "rope_parameters": dict.fromkeys(("mscale", "mscale_all_dim"), 10 * share) if share else {},
    }


_LATENT_NAMES = {
    **{f"attn_{theirs}": f"self_attn.{ours}" for theirs, ours in (
        ("q_a", "q_a_proj"), ("q_a_norm", "q_a_layernorm"), ("q_b", "q_b_proj"), ("kv_a_mqa", "kv_a_proj_with_mqa"),
        ("kv_a_norm", "kv_a_layernorm"), ("k_b", "k_b_proj"), ("v_b", "v_b_proj"),
    )},
    **CORRECTED_NAMES,
}  # fmt: skip
_LATENT_GGUF = Gguf("deepseek2", _LATENT_NAMES, experts=True, shared=True, values=_latent_values)

#: The first one's name is that of all GGUF files.
LATENTS = {
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3, DeepSeek-R1, Kimi K2", deepseek, _V3, _LATENT_GGUF),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", deepseek, _V2, _LATENT_GGUF),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", deepseek, _FLASH, _LATENT_GGUF),
}
