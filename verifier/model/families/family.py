"""One family, and helpers for all families: reading the keys that most config.json files share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foresay.verifier.model.feed_forward import MLP, Activation, Experts
from foresay.verifier.model.fields import LARGEST_FLOAT, Fields
from foresay.verifier.model.layers import BEFORE, Attention, Layer, Mixer, Norms, Stack
from foresay.verifier.model.products import OUTPUT, QKV, NormKind
from foresay.verifier.model.rope_config import LongScaling, RopeConfig, read_rope

#: More than any model has: each takes memory long before the weights are read.
MOST_LAYERS = 10_000
#: Checkpoints' names of fused queries, keys and values, and of fused gate and up matrices.
FUSED_QKV, FUSED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
#: config.json's names of supported activations, and ours.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gguf:
    """A family's GGUF files.

    architecture: what they call it; mixture: and models with experts, if otherwise. names: tensors in a layer that they
    call otherwise than most do, theirs to ours. in_pairs: numbers of queries and keys that rotate together lie side by
    side there, and half a head apart here. windowed: whether they may have a window. experts: whether they have
    experts, None: some do; shared: one of them for all rows. values: what they leave out of config.json's words, from
    their fields and the width of a head.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    in_pairs: bool = False
    windowed: bool = False
    experts: bool | None = False
    shared: bool = False
    values: Callable[[Fields, int], dict[str, Any]] = lambda fields, head_dim: {}
    mixture: str = ""


#: Most families' names of sandwich norms (before and after a block).
SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Family:
    """models: the common names of its models. stack: makes it from a configuration. defaults: the meaning of absent
    keys (null ones are derived). gguf: its GGUF files, if there are any."""

    models: str
    stack: Callable[[Fields], Stack]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: Gguf | None = None


def layer_count(fields: Fields) -> int:
    """How many layers the model has."""
    return fields.integer("num_hidden_layers", most=MOST_LAYERS)


def rms_norm(fields: Fields, **more: Any) -> NormKind:
    """An RMS norm with the epsilon of config.json."""
    return NormKind(fields.number("rms_norm_eps", 1e-6), **more)


def attention(fields: Fields, rope: RopeConfig | None, **more: Any) -> Attention:
    """The attention of a configuration, with the fields in ``more``; rope: checked against the heads' width."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; the rotary embedding needs pairs")
    if rope is not None:
        _check_rotated(fields, rope, head_dim)
    return Attention(heads, kv_heads, head_dim, **{"scale": 1 / math.sqrt(head_dim), "rope": rope, **more})


def _check_rotated(fields: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Check that there is a whole number of pairs, and as many factors."""
    rotated = rope.rotated(head_dim)
    if rotated % 2 or not rotated:
        raise fields.error(f"partial_rotary_factor {rope.share:g} rotates {rotated} of {head_dim} numbers, not pairs")
    match rope.parameters:
        case LongScaling() as scaling if {len(scaling.short), len(scaling.long)} != {rotated // 2}:
            raise fields.error(f"short_factor and long_factor must have {rotated // 2} numbers, one for each pair")


def mlp(
    fields: Fields,
    activation: Activation = "silu",
    key: str = "hidden_act",
    bias: bool = False,
    fused: bool = False,
    width: str = "intermediate_size",
) -> MLP:
    """The MLP. activation: the family's, unless ``key`` names one. fused: gate and up matrices are one tensor. width:
    the key of its width."""
    name = fields.get(key) or fields.get("hidden_act") or activation
    if {**ACTIVATIONS, activation: activation}.get(str(name)) != activation:
        wanted = next(each for each, known in ACTIVATIONS.items() if known == activation)
        raise fields.error(f"{key} {name!r} is not supported; supported is {wanted}")
    return MLP(fields.integer(width), activation, bias, FUSED_GATE_UP if fused else None)


def biases(fields: Fields, **flags: str | bool) -> tuple[str, ...]:
    """The products that have biases: each by a flag of config.json, or always."""
    found = {name: fields.flag(flag, False) if isinstance(flag, str) else flag for name, flag in flags.items()}
    return tuple(name for name, has in found.items() if has)


def biased(fields: Fields) -> tuple[str, ...]:
    """The products that have biases if ``attention_bias`` is set: those into the heads and out of them."""
    return biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})


def stack(
    fields: Fields,
    own: Attention | Sequence[Mixer],
    inner: MLP | Experts | Sequence[MLP | Experts],
    norm: NormKind,
    norms: Norms = BEFORE,
) -> Stack:
    """Layers that differ in nothing else. own, inner: of each layer, or of all. norm: the last one too."""
    count = len(own) if isinstance(own, Sequence) else layer_count(fields)
    mixers = own if isinstance(own, Sequence) else [own] * count
    inners = inner if isinstance(inner, Sequence) else [inner] * count
    return Stack(tuple(Layer(*each, norm, norms) for each in zip(mixers, inners, strict=True)), norm)


def ropes_by_kind(fields: Fields) -> tuple[RopeConfig, RopeConfig] | None:
    """The rotary embeddings of full-attention and of sliding-window layers; None if the configuration has one for
    all."""
    kinds = fields.section("rope_parameters")
    if kinds is None or "full_attention" not in kinds.values:
        return None
    found = (kinds.section(kind) for kind in ("full_attention", "sliding_attention"))
    full, local = (
        read_rope(Fields({**fields.values, "rope_parameters": dict(one.values) if one else {}}, fields.where))
        for one in found
    )
    return full, local


def ropes_by_theta(fields: Fields, absent: Sequence[bool]) -> list[RopeConfig | None]:
    """The rotary embedding of each layer, by ``layer_rope_theta``, where 0 means none. absent: which layers have one if
    the key is absent."""
    rope, thetas = read_rope(fields), fields.get("layer_rope_theta")
    if thetas is None:
        return [rope if rotates else None for rotates in absent]
    if not isinstance(thetas, list) or len(thetas) != len(absent) or not all(map(_is_theta, thetas)):
        raise fields.error(f"layer_rope_theta must list 0 or a base above 1 for {len(absent)} layers, got {thetas!r}")
    return [replace(rope, theta=float(theta)) if theta else None for theta in thetas]


def _is_theta(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or 1 < value <= LARGEST_FLOAT)


def window(fields: Fields) -> int:
    """How many positions a sliding-window layer attends to."""
    return fields.integer("sliding_window", 4096)


def attentions(
    fields: Fields, slides: Sequence[bool], ropes: tuple[RopeConfig | None, RopeConfig | None], **more: Any
) -> list[Attention]:
    """The attention of each layer. slides: which layers have a sliding window. ropes: of those without one, and of
    those with one. more: further fields of all."""
    return [attention(fields, ropes[each], window=window(fields) if each else None, **more) for each in slides]


def listed(fields: Fields, absent: Sequence[str], other: str) -> list[str]:
    """The kind of each layer by ``layer_types``: full attention, which some layer must have, or the ``other`` one.
    absent: if there is no such key."""
    names = absent if fields.get("layer_types") is None else fields.get("layer_types")
    if not isinstance(names, list) or len(names) != len(absent) or not set(names) <= {other, "full_attention"}:
        raise fields.error(f"layer_types must list {other} or full_attention for {len(absent)} layers: {names!r}")
    if "full_attention" not in names:
        raise fields.error("layer_types must list a layer of full_attention")
    return names


def layer_types(fields: Fields) -> tuple[bool, ...] | None:
    """Which layers have a sliding window, by transformers 5's ``layer_types``; None if it is absent."""
    names, layers = fields.get("layer_types"), layer_count(fields)
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != layers:
        raise fields.error(f"layer_types must list {layers} layers, got {names!r}")
    for name in names:
        if name not in ("full_attention", "sliding_attention"):
            raise fields.error(f"layer type {name!r} is not supported; supported: full_attention, sliding_attention")
    return tuple(name == "sliding_attention" for name in names)


def every(fields: Fields, pattern: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: by ``layer_types``, else all except every ``pattern``-th."""
    return layer_types(fields) or tuple((layer + 1) % pattern != 0 for layer in range(layer_count(fields)))


def uniform_window(fields: Fields, absent: int | None) -> int | None:
    """The window of all layers; None if it is null. absent: the meaning of an absent key."""
    missing = "sliding_window" not in fields.values and absent is None
    found = None if missing or fields.values.get("sliding_window", absent) is None else window(fields)
    if layer_types(fields) not in (None, (found is not None,) * layer_count(fields)):
        raise fields.error("layer_types that differ from sliding_window are not supported for this architecture")
    return found
