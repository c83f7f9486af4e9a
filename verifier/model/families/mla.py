"""Families with multi-head latent attention: DeepSeek's, and those with its layers."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, layer_count, mlp, rms_norm
from foresay.verifier.model.families.mixtures import GLM_NAMES, OWN_WIDTH, corrected, experts, glm_values, shared
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.latents import Latent
from foresay.verifier.model.nodes import Layer, Router, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.rope_config import YarnScaling, read_rope

#: V2's way of choosing experts from the best groups.
_IN_GROUPS = "group_limited_greedy"


def _attention(fields: Fields) -> Latent:
    fields.refuse("attention_bias")
    rope = read_rope(fields, interleaved=fields.flag("rope_interleave", True))
    latent, plain, turning, value = (
        fields.integer(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if turning % 2:
        raise fields.error(f"qk_rope_head_dim {turning} is odd; the rotary embedding needs pairs")
    scale = (plain + turning) ** -0.5
    match rope.parameters:
        case YarnScaling(mscale_all_dim=share) as yarn if share is not None:
            scale *= yarn.mscale_of(share) ** 2
    rank = None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank")
    heads = fields.integer("num_attention_heads")
    return Latent(
        heads, 1, latent + turning, scale, rope, latent=latent, plain=plain, value=value, rank=rank, inner=NormKind()
    )


def deepseek(fields: Fields) -> Stack:
    """DeepSeek's layers: one or several experts are shared."""
    fields.refuse("mlp_bias")
    norm, own = rms_norm(fields), _attention(fields)
    inside = experts(fields, _router(fields), OWN_WIDTH, shared=shared(fields), shared_module="mlp.shared_experts")
    return Stack(tuple(Layer(own, mlp(fields) if dense else inside, norm) for dense in _dense(fields)), norm)


def _router(fields: Fields) -> Router:
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
    return Router(groups=groups, normalised=fields.flag("norm_topk_prob", False), scale=router.scale)


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
_GLM = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}


def _values(fields: Fields, turning: int) -> dict[str, Any]:
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


_NAMES = {
    **{f"attn_{theirs}": f"self_attn.{ours}" for theirs, ours in (
        ("q_a", "q_a_proj"), ("q_a_norm", "q_a_layernorm"), ("q_b", "q_b_proj"), ("kv_a_mqa", "kv_a_proj_with_mqa"),
        ("kv_a_norm", "kv_a_layernorm"), ("k_b", "k_b_proj"), ("v_b", "v_b_proj"),
    )},
    **GLM_NAMES,
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_GGUF = Gguf("deepseek2", _NAMES, experts=True, shared=True, values=_values)

#: The first one's name is that of all GGUF files.
FAMILIES = {
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3, DeepSeek-R1, Kimi K2", deepseek, _V3, _GGUF),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", deepseek, _V2, _GGUF),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", deepseek, _GLM, _GGUF),
}
