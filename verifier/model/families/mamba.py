"""Granite 4, Nemotron-H: most layers are Mamba-2's; Falcon-H1, where each layer has one alongside attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    MOST_LAYERS,
    Family,
    Gguf,
    attention,
    biased,
    layer_count,
    mlp,
    rms_norm,
)
from foresay.verifier.model.families.llama import granite_attention, granite_stack, granite_values
from foresay.verifier.model.families.moe import (
    CORRECTED_NAMES,
    GRANITE_ROUTER,
    GRANITE_STACKS,
    OWN_WIDTH,
    SHARED,
    corrected,
    experts,
    groups_of,
    shared_names,
)
from foresay.verifier.model.feed_forward import MLP, STACKS, Experts, TopKRouter
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Attention, Layer, Mixer, Norms, Stack
from foresay.verifier.model.products import DOWN, GATE_UP, NormKind, Stacked
from foresay.verifier.model.recurrences import UNNORMED, Mamba2
from foresay.verifier.model.rope_config import read_rope

#: How many numbers kernels process at once.
_LANES = 16
#: Infinity in JSON, as written by Python or by transformers.
_BOUNDLESS = ([float("inf")], [{"__float__": "Infinity"}])
#: What ``layer_types`` calls layers.
_ATTENDING, _SCANNING = ("attention", "full_attention"), ("mamba", "linear_attention")
#: For GGUF files: gate and up matrices of shared MLPs are separate tensors; and the name of one next to experts.
_APART, _SHARED = "shared_mlp_apart", "mlp.shared"


def granite_hybrid(fields: Fields) -> Stack:
    """Granite 4: attention has no positions unless requested; an MLP follows each mixer, next to experts if any."""
    rope = read_rope(fields) if fields.get("position_embedding_type") == "rope" else None
    fused, module = (None, _SHARED) if fields.flag(_APART, False) else (FUSED_GATE_UP, "mlp")
    inner: MLP | Experts = MLP(fields.integer("shared_intermediate_size", 1024), mlp(fields).activation, fused=fused)
    if fields.integer("num_local_experts", 8, minimum=0):
        router = TopKRouter(GRANITE_ROUTER)
        inner = experts(fields, router, stacked=GRANITE_STACKS, shared=inner, shared_module=module)
    return granite_stack(fields, inner, _mixers(fields, granite_attention(fields, rope), _granite_mamba))


def _mixers(
    fields: Fields, attends: Attention, scans: Callable[[Fields], Mamba2], **alone: Callable[[Fields], MLP | Experts]
) -> Sequence[Mixer]:
    """The mixers by ``layer_types``, in the names of transformers 4 or 5. scans, alone: called if a layer is one, or
    only an MLP or experts."""
    names = fields.get("layer_types") or fields.get("layers_block_type")
    layers = fields.integer("num_hidden_layers", len(names) if isinstance(names, list) else None, most=MOST_LAYERS)
    if not isinstance(names, list) or len(names) != layers:
        raise fields.error(f"layer_types must list {layers} layers, got {names!r}")
    kinds: dict[str, Callable[[Fields], Mixer]] = dict.fromkeys(_ATTENDING, lambda _: attends)
    kinds |= {**dict.fromkeys(_SCANNING, scans), **alone}
    for name in names:
        if str(name) not in kinds:
            raise fields.error(f"layer type {name!r} is not supported; supported: {', '.join(kinds)}")
    made = {name: kinds[name](fields) for name in set(names)}
    own = [made[name] for name in names]
    if attends not in own:
        raise fields.error("layer_types must list a layer of attention")
    return own


#: Nemotron-H's letters for its layers.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields) -> Stack:
    """Nemotron-H: each layer is a Mamba-2 scan, attention without positions, or an MLP or experts without gates."""
    fields.refuse("use_bias", "mamba_proj_bias", "mlp_bias", "sliding_window")
    norm, pattern = _nemotron_norm(fields), fields.get("hybrid_override_pattern")
    if fields.get("layers_block_type") is None and isinstance(pattern, str):
        names = [_LETTERS.get(letter, letter) for letter in pattern]
        fields = Fields({**fields.values, "layers_block_type": names, "num_hidden_layers": len(names)}, fields.where)
    attends = attention(fields, None, biases=biased(fields))
    own = _mixers(fields, attends, _nemotron_mamba, mlp=_nemotron_mlp, moe=_nemotron_experts)
    return Stack(tuple(Layer(each, None, norm, Norms("input_layernorm")) for each in own), norm)


def _nemotron_mlp(fields: Fields, width: str = "intermediate_size") -> MLP:
    return mlp(fields, "relu2", "mlp_hidden_act", width=width)


#: Where files have a tensor of all experts, which have no gates.
_STACKS = {
    GATE_UP: (Stacked("mlp.experts.up_proj"), Stacked("mlp.experts.up_proj.weight")),
    DOWN: STACKS[DOWN],
}


def _nemotron_experts(fields: Fields) -> Experts:
    """DeepSeek's router; the shared expert has a width of its own."""
    fields.refuse("moe_latent_size")
    one, shared = _nemotron_mlp(fields, OWN_WIDTH), _nemotron_mlp(fields, "moe_shared_expert_intermediate_size")
    return experts(fields, corrected(fields), one=one, stacked=_STACKS, shared=shared, shared_module=SHARED)


def _nemotron_norm(fields: Fields) -> NormKind:
    return NormKind(fields.number("layer_norm_epsilon", 1e-5), wide=True)


def _nemotron_mamba(fields: Fields) -> Mamba2:
    if fields.get("mamba_hidden_act") not in (None, "silu", "swish"):
        raise fields.error(f"mamba_hidden_act {fields.get('mamba_hidden_act')!r} is not supported; supported is silu")
    sizes = fields.integer("n_groups", 8), fields.integer("mamba_num_heads", 128)
    widths = fields.integer("ssm_state_size", 128), fields.integer("mamba_head_dim", 64)
    taps = fields.integer("conv_kernel", 4, minimum=2, most=64)
    return _mamba(fields, (*sizes, *widths), taps, "use_conv_bias", _nemotron_norm(fields))


def _granite_mamba(fields: Fields) -> Mamba2:
    fields.refuse("mamba_proj_bias")
    return _sized(fields, fields.integer("mamba_expand", 2) * fields.integer("hidden_size"), rms_norm(fields))


def _sized(fields: Fields, wide: int, norm: NormKind) -> Mamba2:
    """wide: of all its heads."""
    heads = fields.integer("mamba_n_heads", 128)
    width = fields.get("mamba_d_head")
    dim = wide // heads if width in (None, "auto") else fields.integer("mamba_d_head")
    if heads * dim != wide:
        raise fields.error(f"mamba_n_heads {heads} times mamba_d_head {dim} is not mamba_expand times hidden_size")
    sizes = fields.integer("mamba_n_groups", 1), heads, fields.integer("mamba_d_state", 256), dim
    taps = fields.integer("mamba_d_conv", 4, minimum=2, most=64)
    return _mamba(fields, sizes, taps, "mamba_conv_bias", norm)


def falcon_h1(fields: Fields) -> Stack:
    """Falcon-H1: what each layer and its parts read and put out is multiplied by numbers of config.json.

    Factors of inputs are part of the norms before, whose outputs are multiplied by those that no product is linear in:
    of the scan's gates and the MLP's.
    """
    fields.refuse("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
    gates, values, keys, queries, steps = _numbers(fields, "ssm_multipliers", 5)
    into, back = _numbers(fields, "mlp_multipliers", 2)
    read = fields.number("ssm_in_multiplier", 1.0) * gates
    share = fields.number("attention_in_multiplier", 1.0) / read
    own = attention(fields, read_rope(fields))
    own = replace(own, scale=own.scale * share**2 * fields.number("key_multiplier", 1.0))
    scan = replace(_falcon_mamba(fields), factors=(queries / gates, keys / gates, values / gates, steps / gates))
    layer = Layer(
        own,
        mlp(fields),
        norm := rms_norm(fields, wide=True),
        residual_mul=share * fields.number("attention_out_multiplier", 1.0),
        mlp_scale=back / into,
        scan=(scan, fields.number("ssm_out_multiplier", 1.0)),
        input_scales=(read, into),
    )
    scales = fields.number("embedding_multiplier", 1.0), fields.number("lm_head_multiplier", 1.0)
    return Stack((layer,) * layer_count(fields), norm, scales[0], logit_scale=scales[1])


def _numbers(fields: Fields, key: str, count: int) -> list[float]:
    """A list of so many positive numbers; ones if it is absent."""
    found = fields.get(key) or [1.0] * count
    if not isinstance(found, list) or len(found) != count:
        raise fields.error(f"{key} must list {count} numbers, got {found!r}")
    return [Fields({key: each}, fields.where).number(key) for each in found]


def _falcon_mamba(fields: Fields) -> Mamba2:
    wide = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * fields.integer("hidden_size"))
    normed = fields.flag("mamba_rms_norm", False)
    if normed and fields.flag("mamba_norm_before_gate", True):
        raise fields.error("mamba_norm_before_gate is not supported")
    return _sized(fields, wide, rms_norm(fields) if normed else UNNORMED)


def _mamba(fields: Fields, sizes: tuple[int, int, int, int], taps: int, bias: str, norm: NormKind) -> Mamba2:
    """sizes: groups, heads, widths of states and of heads. bias: the key that says whether the convolution has one.

    Steps have no other limits: ``time_step_min`` is for random weights (docs/recurrent.md).
    """
    groups, heads, state, dim = sizes
    limit = fields.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or limit[:1] != [0.0] or limit[1:] not in _BOUNDLESS):
        raise fields.error(f"time_step_limit {limit!r} is not supported; supported: 0 to infinity")
    if heads % groups or state % _LANES or dim % _LANES:
        raise fields.error(
            f"{heads} heads of {groups} groups, {dim} wide, with states of {state}: heads must be whole groups, "
            f"widths multiples of {_LANES}"
        )
    return Mamba2(groups, heads, state, dim, taps, replace(norm, wide=True), fields.flag(bias, True))


def _of_heads(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": fields.integer("ssm.inner_size") // heads,
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
    }


def _of_granite(fields: Fields, head_dim: int) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    return {
        **granite_values(fields, head_dim),
        **_of_heads(fields),
        "layer_types": ["attention" if each else "mamba" for each in _by_layer(fields, "attention.head_count_kv")],
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": fields.integer(shared, fields.integer("feed_forward_length")),
        "num_local_experts": fields.integer("expert_count", 0, minimum=0),
        "mamba_expand": fields.integer("ssm.inner_size") // fields.integer("embedding_length"),
        _APART: True,
    }


def _by_layer(fields: Fields, key: str) -> list[Any]:
    found = fields.get(key)
    return found if isinstance(found, list) else [found] * fields.integer("block_count")


def _of_nemotron(fields: Fields, head_dim: int) -> dict[str, Any]:
    both = zip(_by_layer(fields, "attention.head_count_kv"), _by_layer(fields, "feed_forward_length"), strict=True)
    heads, alone = fields.integer("ssm.time_step_rank"), "moe" if fields.get("expert_count") else "mlp"
    names = ["attention" if attends else alone if inner else "mamba" for attends, inner in both]
    return {
        "layer_types": names[: len(names) - fields.integer("nextn_predict_layers", 0, minimum=0)],
        "n_routed_experts": fields.get("expert_count"),
        "moe_shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.get("moe_latent_size"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        **groups_of(fields),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": fields.integer("ssm.inner_size") // heads,
        "ssm_state_size": fields.integer("ssm.state_size"),
        "n_groups": fields.integer("ssm.group_count"),
        "conv_kernel": fields.integer("ssm.conv_kernel"),
    }


def _of_falcon(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Weights in files are multiplied already."""
    wide = fields.integer("ssm.inner_size")
    return {**_of_heads(fields), "mamba_d_ssm": wide, "mamba_norm_before_gate": False}


#: llama.cpp's names of the parts of Mamba-2.
_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_EXPERTS = {"ffn_gate_inp": GRANITE_ROUTER, **shared_names(_SHARED)}
_GRANITE = {"rms_norm_eps": 1e-6, "num_experts_per_tok": 2}
_GGUF = Gguf("granitehybrid", {**_NAMES, **_EXPERTS}, in_pairs=True, experts=None, shared=True, values=_of_granite)

_NEMOTRON = {"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 2}
#: The norm before the MLP has no suffix.
_FALCON_NAMES = {**_NAMES, "ffn_norm": "post_attention_layernorm.weight"}
_FALCON = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}

FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family("Granite 4 and 4-H", granite_hybrid, _GRANITE, _GGUF),
    "NemotronHForCausalLM": Family(
        "Nemotron-H, Nemotron Nano 2 and 3",
        nemotron_h,
        _NEMOTRON,
        Gguf(
            "nemotron_h",
            {**_NAMES, **CORRECTED_NAMES},
            experts=None,
            shared=True,
            values=_of_nemotron,
            mixture="nemotron_h_moe",
        ),
    ),
    "FalconH1ForCausalLM": Family("Falcon-H1", falcon_h1, _FALCON, Gguf("falcon-h1", _FALCON_NAMES, values=_of_falcon)),
}
