"""Granite 4, Nemotron-H: most layers are Mamba-2's."""

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
    biases,
    mlp,
    rms_norm,
)
from foresay.verifier.model.families.granite import granite_attention, granite_stack, granite_values
from foresay.verifier.model.families.mixtures import GRANITE_ROUTER, GRANITE_STACKS, experts
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import MLP, Attention, Experts, Layer, Mixer, Norms, Router, Stack
from foresay.verifier.model.products import OUTPUT, QKV, NormKind
from foresay.verifier.model.recurrences import Mamba2
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
    fused, beside = (None, _SHARED) if fields.flag(_APART, False) else (FUSED_GATE_UP, "mlp")
    inner: MLP | Experts = MLP(fields.integer("shared_intermediate_size", 1024), mlp(fields).activation, fused=fused)
    if fields.integer("num_local_experts", 8, minimum=0):
        router = Router(GRANITE_ROUTER)
        inner = experts(fields, router, stacked=GRANITE_STACKS, shared=inner, shared_module=beside)
    return granite_stack(fields, inner, _mixers(fields, granite_attention(fields, rope), _granite_mamba))


def _mixers(
    fields: Fields, attends: Attention, scans: Callable[[Fields], Mamba2], alone: MLP | None = None
) -> Sequence[Mixer]:
    """The mixers by ``layer_types``, in the names of transformers 4 or 5. scans: called if a layer is one. alone: an
    MLP that layers may consist of."""
    names = fields.get("layer_types") or fields.get("layers_block_type")
    layers = fields.integer("num_hidden_layers", len(names) if isinstance(names, list) else None, most=MOST_LAYERS)
    if not isinstance(names, list) or len(names) != layers:
        raise fields.error(f"layer_types must list {layers} layers, got {names!r}")
    supported = (*_ATTENDING, *_SCANNING, *(() if alone is None else ("mlp",)))
    for name in names:
        if name not in supported:
            raise fields.error(f"layer type {name!r} is not supported; supported: {', '.join(supported)}")
    kinds: dict[str, Mixer] = {} if alone is None else {"mlp": alone}
    kinds.update(dict.fromkeys(_ATTENDING, attends))
    if any(name in _SCANNING for name in names):
        kinds.update(dict.fromkeys(_SCANNING, scans(fields)))
    own = [kinds[name] for name in names]
    if attends not in own:
        raise fields.error("layer_types must list a layer of attention")
    return own


#: Nemotron-H's letters for its layers.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields) -> Stack:
    """Nemotron-H: each layer is a Mamba-2 scan, attention without positions, or an MLP without gates."""
    fields.refuse("use_bias", "mamba_proj_bias", "mlp_bias", "sliding_window")
    norm, pattern = _nemotron_norm(fields), fields.get("hybrid_override_pattern")
    if fields.get("layers_block_type") is None and isinstance(pattern, str):
        names = [_LETTERS.get(letter, letter) for letter in pattern]
        fields = Fields({**fields.values, "layers_block_type": names, "num_hidden_layers": len(names)}, fields.where)
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    inner = mlp(fields, "relu2", "mlp_hidden_act")
    own = _mixers(fields, attention(fields, None, biases=has), _nemotron_mamba, inner)
    return Stack(tuple(Layer(each, None, norm, Norms("input_layernorm")) for each in own), norm)


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
    wide = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads", 128)
    width = fields.get("mamba_d_head")
    dim = wide // heads if width in (None, "auto") else fields.integer("mamba_d_head")
    if heads * dim != wide:
        raise fields.error(f"mamba_n_heads {heads} times mamba_d_head {dim} is not mamba_expand times hidden_size")
    sizes = fields.integer("mamba_n_groups", 1), heads, fields.integer("mamba_d_state", 256), dim
    taps = fields.integer("mamba_d_conv", 4, minimum=2, most=64)
    return _mamba(fields, sizes, taps, "mamba_conv_bias", rms_norm(fields))


def _mamba(fields: Fields, sizes: tuple[int, int, int, int], taps: int, bias: str, norm: NormKind) -> Mamba2:
    """sizes: groups, heads, widths of states and of heads. bias: the key that says whether the convolution has one.

    Steps are not clamped at ``time_step_min``: transformers does that to Nemotron-H's in prompts, but not in decoding.
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


def _of_granite(fields: Fields, head_dim: int) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    wide, heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    return {
        **granite_values(fields, head_dim),
        "layer_types": ["attention" if each else "mamba" for each in _by_layer(fields, "attention.head_count_kv")],
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": fields.integer(shared, fields.integer("feed_forward_length")),
        "num_local_experts": fields.integer("expert_count", 0, minimum=0),
        "mamba_n_heads": heads,
        "mamba_d_head": wide // heads,
        "mamba_expand": wide // fields.integer("embedding_length"),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        _APART: True,
    }


def _by_layer(fields: Fields, key: str) -> list[Any]:
    found = fields.get(key)
    return found if isinstance(found, list) else [found] * fields.integer("block_count")


def _of_nemotron(fields: Fields, head_dim: int) -> dict[str, Any]:
    both = zip(_by_layer(fields, "attention.head_count_kv"), _by_layer(fields, "feed_forward_length"), strict=True)
    heads = fields.integer("ssm.time_step_rank")
    return {
        "layer_types": ["attention" if attends else "mlp" if inner else "mamba" for attends, inner in both],
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": fields.integer("ssm.inner_size") // heads,
        "ssm_state_size": fields.integer("ssm.state_size"),
        "n_groups": fields.integer("ssm.group_count"),
        "conv_kernel": fields.integer("ssm.conv_kernel"),
    }


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
_EXPERTS = {
    "ffn_gate_inp": GRANITE_ROUTER,
    **{f"ffn_{kind}_shexp": f"{_SHARED}.{kind}_proj" for kind in ("gate", "up", "down")},
}
_GRANITE = {"rms_norm_eps": 1e-6, "num_experts_per_tok": 2}
_GGUF = Gguf("granitehybrid", {**_NAMES, **_EXPERTS}, in_pairs=True, experts=None, shared=True, values=_of_granite)

_NEMOTRON = {"head_dim": 128, "num_key_value_heads": 8}

FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family("Granite 4 and 4-H", granite_hybrid, _GRANITE, _GGUF),
    "NemotronHForCausalLM": Family(
        "Nemotron-H, Nemotron Nano 2 and 3 (dense)",
        nemotron_h,
        _NEMOTRON,
        Gguf("nemotron_h", _NAMES, values=_of_nemotron),
    ),
}
