"""Families with norms after their blocks: Gemma 2 to 4 and Muse Glimmer, which have them before too, OLMo 2 and 3,
Exaone 4. Most have sliding windows.

Muse Glimmer has normalised embeddings and gated heads; its layers without a window have no rotary embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foresay.verifier.model.families.family import (
    SANDWICH_NAMES,
    Family,
    Gguf,
    attention,
    attentions,
    biased,
    every,
    layer_count,
    layer_types,
    mlp,
    rms_norm,
    ropes_by_kind,
    ropes_by_theta,
    stack,
    window,
)
from foresay.verifier.model.families.layer_extras import with_extras
from foresay.verifier.model.feed_forward import MLP
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import AFTER, SANDWICH, Attention, Layer, QKNorm, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.rope_config import RopeConfig, read_rope


def gemma2(fields: Fields) -> Stack:
    """Gemma 2: every other layer has a sliding window; scores and logits are capped."""
    caps = (fields.optional_number(f"{name}_logit_softcapping") for name in ("attn", "final"))
    attn_cap, final_cap = caps
    rope = read_rope(fields)
    return replace(_gemma(fields, (rope, rope), pattern=2, softcap=attn_cap), logit_cap=final_cap)


def gemma3(fields: Fields) -> Stack:
    """Gemma 3: all but every sixth layer (``sliding_window_pattern``) have a sliding window, with their own rotary
    embedding; heads are normalised."""
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping")
    ropes = ropes_by_kind(fields) or (read_rope(fields), RopeConfig(fields.number("rope_local_base_freq", 10_000.0)))
    pattern = fields.integer("sliding_window_pattern", 6)
    return _gemma(fields, ropes, pattern, norm=QKNorm(_norm(fields)))


def _norm(fields: Fields) -> NormKind:
    """Its weights are stored minus one."""
    return rms_norm(fields, wide=True, less_one=True)


def _gemma(fields: Fields, ropes: tuple[RopeConfig, RopeConfig], pattern: int, **more: Any) -> Stack:
    """ropes: of full-attention and of sliding-window layers. more: of attention."""
    fields.refuse("use_bidirectional_attention")
    scale, inner = 1 / math.sqrt(fields.number("query_pre_attn_scalar")), mlp(fields, "gelu", "hidden_activation")
    own = attentions(fields, every(fields, pattern), ropes, scale=scale, biases=biased(fields), **more)
    made = stack(fields, own, inner, _norm(fields), SANDWICH)
    return replace(made, embedding_scale=math.sqrt(fields.integer("hidden_size")))


#: Values that the configurations of its larger models leave out.
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
#: The distance between Gemma 3's layers without a window, which files do not state.
_PATTERN = 6


def _gguf3(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Values of Gemma 3 that llama.cpp hard-codes."""
    pattern = fields.get("attention.sliding_window_pattern")
    return {
        "sliding_window_pattern": _PATTERN if isinstance(pattern, list) else pattern or _PATTERN,
        "query_pre_attn_scalar": _scalar(fields, head_dim, largest=62),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
    }


def _gguf2(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The same for Gemma 2."""
    caps = {key: fields.number(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {"query_pre_attn_scalar": _scalar(fields, head_dim, largest=46), **caps}


def _scalar(fields: Fields, head_dim: int, largest: int) -> int:
    """largest: the number of layers of the family's largest model, whose attention scale does not follow from the head
    width."""
    whole = fields.integer("embedding_length") // fields.integer("attention.head_count")
    return whole if fields.integer("block_count") == largest else head_dim


_GGUF2 = Gguf("gemma2", SANDWICH_NAMES, windowed=True, values=_gguf2)
_GGUF3 = Gguf("gemma3", SANDWICH_NAMES, windowed=True, values=_gguf3)

GEMMA = {
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2, _GEMMA2, _GGUF2),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma3, _GEMMA3, _GGUF3),
}


# -- Gemma 4 -----------------------------------------------------------------------------------------------------------


def gemma4(fields: Fields) -> Stack:
    """Gemma 4: layers without a window have wider heads, perhaps fewer of keys, whose product may be the values too;
    the last layers may read the keys and values of earlier ones."""
    if fields.get("use_bidirectional_attention") not in (None, "vision"):  # that one concerns images alone
        raise fields.error("use_bidirectional_attention other than null or 'vision' is not supported")
    *others, _ = every(fields, _PATTERN)
    slides = (*others, False)
    own = _attentions4(fields, slides)
    inner = [_mlp4(fields, one.source is not None) for one in own]
    made = stack(fields, own, inner, rms_norm(fields, wide=True), SANDWICH)
    return replace(
        with_extras(fields, made),
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _mlp4(fields: Fields, shares: bool) -> MLP:
    """shares: whether the layer reads the keys of another."""
    own = mlp(fields, "gelu", "hidden_activation")
    return replace(own, inner=2 * own.inner) if shares and fields.flag("use_double_wide_mlp", False) else own


def _attentions4(fields: Fields, slides: Sequence[bool]) -> list[Attention]:
    ropes = ropes_by_kind(fields)
    if ropes is None:
        raise fields.error("rope_parameters must have those of full_attention and of sliding_attention")
    norm, alike = rms_norm(fields, wide=True), fields.flag("attention_k_eq_v", False)
    values = replace(norm, weighted=False)
    more = {"scale": 1.0, "biases": biased(fields), "norm": QKNorm(norm), "value_norm": values}
    made: list[Attention] = []
    for own, slides_here, source in zip(_widths(fields, slides), slides, _sources(fields, slides), strict=True):
        seen, from_keys = window(fields) if slides_here else None, alike and not slides_here and source is None
        kind = {"window": seen, "values_from_keys": from_keys, "source": source}
        made.append(attention(own, ropes[slides_here], **kind, **more))
        if source is not None and _kept(made[-1]) != _kept(made[source]):
            raise fields.error(f"layer {len(made) - 1} has other widths than layer {source}, whose keys it reads")
    return made


def _kept(node: Attention) -> tuple[int, int]:
    return node.kv_heads, node.head_dim


def _widths(fields: Fields, slides: Sequence[bool]) -> list[Fields]:
    """The configuration of each layer: with ``per_layer_config`` (newer files), or else with the widths of layers
    without a window."""
    if "per_layer_config" in fields.values:
        listed = dict((section.values if (section := fields.section("per_layer_config")) else {}).items())
    else:
        wide = {"head_dim": fields.integer("global_head_dim", 512)}
        if fields.flag("attention_k_eq_v", False) and fields.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
        listed = {str(layer): wide for layer, slides_here in enumerate(slides) if not slides_here}
    changes: list[dict[str, Any]] = [{} for _ in slides]
    for layer, changed in listed.items():  # layers may be numbered "5" or, as transformers writes them, "05"
        known = layer.isdecimal() and int(layer) < len(slides) and isinstance(changed, dict)
        if not known or set(changed) - {"head_dim", "num_key_value_heads"}:
            which = f"{changed!r} of {layer!r}"
            raise fields.error(f"per_layer_config may have head_dim and num_key_value_heads of layers, got {which}")
        changes[int(layer)] |= changed
    return [Fields({**fields.values, **each}, fields.where) for each in changes]


def _sources(fields: Fields, slides: Sequence[bool]) -> list[int | None]:
    """For each layer the one whose keys and values it reads: of the last ``num_kv_shared_layers`` the last earlier one
    of the same kind."""
    own = len(slides) - fields.integer("num_kv_shared_layers", 0, minimum=0, most=len(slides) - 1)
    last = {kind: layer for layer, kind in enumerate(slides[:own])}
    if set(slides[own:]) - set(last):
        raise fields.error("num_kv_shared_layers leaves no layer of a kind to share its keys and values")
    return [None] * own + [last[kind] for kind in slides[own:]]


_ROPES4 = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA4 = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 512, "rope_parameters": _ROPES4, "hidden_size_per_layer_input": 256, "tie_word_embeddings": True,
}  # fmt: skip
_UNIFIED = {
    **_GEMMA4, "max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip


def _gguf4(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The widths of each layer, as files state them. head_dim: of layers without a window."""
    slides, shared = fields.get(_SLIDES), fields.integer("attention.shared_kv_layers", 0, minimum=0)
    if not isinstance(slides, list) or not any(slides):
        raise fields.error(f"{_SLIDES} must say for each layer whether it has a window, and one must")
    keys, inner = (_listed(fields, key, len(slides)) for key in ("attention.head_count_kv", "feed_forward_length"))
    narrow = fields.integer("attention.key_length_swa", head_dim)
    for other in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(other, narrow) != narrow:
            raise fields.error(f"{other} that differs from attention.key_length_swa {narrow} is not supported")
    own, double = [inner[0]] * (len(slides) - shared), inner[-1] != inner[0]
    if inner != own + [(1 + double) * inner[0]] * shared:
        raise fields.error("feed_forward_length must be one number, or its double in layers that share keys")
    wide = {
        str(at): {"head_dim": head_dim, "num_key_value_heads": keys[at]} for at, one in enumerate(slides) if not one
    }
    return {
        "head_dim": narrow,
        "num_key_value_heads": keys[slides.index(True)],
        "per_layer_config": wide,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": double,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "enable_moe_block": bool(fields.get("expert_count")),
        "top_k_experts": fields.get("expert_used_count"),
    }


_SLIDES = "attention.sliding_window_pattern"


def _listed(fields: Fields, key: str, count: int) -> list[int]:
    """A number of each layer, which may be one for all."""
    found = fields.get(key)
    if not isinstance(found, list):
        return [fields.integer(key)] * count
    if len(found) != count or not all(type(one) is int and one > 0 for one in found):
        raise fields.error(f"{key} must be a number, or one for each of {count} layers, got {found!r}")
    return found


_NAMES4 = {
    **SANDWICH_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GGUF4 = Gguf("gemma4", _NAMES4, windowed=True, experts=None, values=_gguf4)

GEMMA |= {
    "Gemma4ForCausalLM": Family("Gemma 4", gemma4, _GEMMA4, _GGUF4),
    "Gemma4UnifiedForCausalLM": Family("Gemma 4", gemma4, _UNIFIED),
}


# -- Muse Glimmer ------------------------------------------------------------------------------------------------------


def muse_glimmer(fields: Fields) -> Stack:
    """Three of four layers have a sliding window, counted from the last."""
    count = layer_count(fields)
    apart = [(count - 1 - layer) % 4 != 0 for layer in range(count)]
    after = NormKind(fields.number("post_norm_eps", 1e-8), wide=True, less_one=True)
    plain = rms_norm(fields, wide=True, weighted=False)
    of_heads = QKNorm(replace(plain, weighted=fields.flag(_WEIGHTED, False)))
    scale = fields.number("qk_scale_factor", 3.87) / math.sqrt(fields.integer("head_dim", 128))
    more = {"scale": scale, "biases": biased(fields), "norm": of_heads, "gated": True}
    own = (
        attention(fields, rope, window=window(fields) if sliding else None, **more)
        for sliding, rope in zip(layer_types(fields) or apart, ropes_by_theta(fields, apart), strict=True)
    )
    norm, inner = _norm(fields), mlp(fields, key="hidden_activation")
    return Stack(
        tuple(Layer(each, inner, norm, SANDWICH, after=after) for each in own),
        rms_norm(fields, wide=True),
        embedding_norm=plain,
        logit_scale=fields.number("output_multiplier", 0.19611613513818404),
        logit_cap=fields.number("final_logit_softcapping", 20.0),
    )


#: GGUF files have weights for the norms of heads, with ``qk_scale_factor`` in those of queries.
_WEIGHTED = "qk_norm_weights"


def _gguf_muse(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        _WEIGHTED: True,
        "qk_scale_factor": 1.0,
        "output_multiplier": fields.number("logit_scale"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


_GGUF_MUSE = Gguf("muse-glimmer", {**SANDWICH_NAMES, "attn_gate": "self_attn.gate_proj"}, in_pairs=True, windowed=True,
             values=_gguf_muse)  # fmt: skip
_ABSENT_MUSE = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048}

MUSE = {"MuseGlimmerForConditionalGeneration": Family("Muse Glimmer", muse_glimmer, _ABSENT_MUSE, _GGUF_MUSE)}

# -- norms only after attention and the MLP, and of queries and keys ---------------------------------------------------


def olmo2(fields: Fields) -> Stack:
    """OLMo 2: queries and keys are normalised over all heads."""
    norm = rms_norm(fields, wide=True)
    own = attention(fields, read_rope(fields), biases=biased(fields), norm=QKNorm(norm, whole=True))
    return stack(fields, own, mlp(fields), norm, AFTER)


def olmo3(fields: Fields) -> Stack:
    """OLMo 3: three of four layers have a sliding window; the others may have a longer rotary embedding."""
    norm, ropes = rms_norm(fields, wide=True), ropes_by_kind(fields) or _same_theta(fields)
    of_heads = QKNorm(norm, whole=True)
    own = attentions(fields, every(fields, 4), ropes, biases=biased(fields), norm=of_heads)
    return stack(fields, own, mlp(fields), norm, AFTER)


def _same_theta(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full-attention layers, and of sliding-window layers, which are not scaled."""
    full = read_rope(fields)
    return full, replace(full, parameters=None)


def exaone4(fields: Fields) -> Stack:
    """Exaone 4: if some layers have a sliding window, the others have no rotary embedding."""
    norm, rope = rms_norm(fields), read_rope(fields)
    whole = fields.values.get("sliding_window", 4096) is None
    slides = (False,) * layer_count(fields) if whole else every(fields, _pattern(fields))
    own = attentions(fields, slides, (rope if whole else None, rope), norm=QKNorm(norm))
    return stack(fields, own, mlp(fields), norm, AFTER)


def _pattern(fields: Fields) -> int:
    """The distance between layers without a window: a number, or a word in which G is such a layer ("LLLG")."""
    found = fields.get("sliding_window_pattern")
    return len(found) if isinstance(found, str) and found else fields.integer("sliding_window_pattern", 4)


_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_OLMO = {"rms_norm_eps": 1e-5}
_OLMO3 = {**_OLMO, "rope_theta": 500_000.0}

OLMO = {
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2, _OLMO, Gguf("olmo2", _BEHIND)),
    "Olmo3ForCausalLM": Family("OLMo 3", olmo3, _OLMO3, Gguf("olmo2", _BEHIND, windowed=True)),
    "Exaone4ForCausalLM": Family("Exaone 4", exaone4, _OLMO, Gguf("exaone4", _BEHIND, windowed=True)),
}
