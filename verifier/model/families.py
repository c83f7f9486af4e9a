"""The families of decoders, by their names in config.json: what each fixes, and what it lets config.json choose.

All are stacks of attention and a gated MLP with RMS norms before both. An entry says where a family departs from that:
biases, norms of heads, windows, layers without positions, matrices that files hold as one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foresay.verifier.model.fields import Fields
from foresay.verifier.model.sizes import DOWN, GATE_UP, OUTPUT, QKV

#: A window, and which layers have it.
Sliding = tuple[int | None, tuple[bool, ...]]
#: Biases of a product that are always there, and those that a flag of config.json decides.
ALWAYS = "always"


def _no_window(fields: Fields, layers: int) -> Sliding:
    return None, (False,) * layers


def _uniform_window(fields: Fields, layers: int, absent: int | None = 4096) -> Sliding:
    """Mistral: every layer slides, or none where the window is null. An absent key means the window of v0.1."""
    missing = "sliding_window" not in fields.values and absent is None
    window = None if missing or fields.values.get("sliding_window", absent) is None else _window(fields)
    slides = (window is not None,) * layers
    if layer_types(fields, layers) not in (None, slides):
        raise fields.error("layer_types that differ from sliding_window are not supported for this architecture")
    return window, slides


def _phi_window(fields: Fields, layers: int) -> Sliding:
    """Phi: likewise, but an absent key means none."""
    return _uniform_window(fields, layers, None)


def _window_by_layer(fields: Fields, layers: int) -> Sliding:
    """Qwen: off unless use_sliding_window; then layer_types says where, else the layers from max_window_layers on."""
    enabled = fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None
    first = fields.integer("max_window_layers", 28, minimum=0) if enabled else layers
    slides = layer_types(fields, layers) or tuple(layer >= first for layer in range(layers))
    if any(slides) and not enabled:
        raise fields.error("layer_types has sliding layers, but use_sliding_window and sliding_window name no window")
    return _window(fields) if any(slides) else None, slides


def _window(fields: Fields) -> int:
    return fields.integer("sliding_window", 4096)


def layer_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Which layers slide, by transformers 5's ``layer_types``."""
    names = fields.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != layers:
        raise fields.error(f"layer_types must list {layers} layers, got {names!r}")
    for name in names:
        if name not in ("full_attention", "sliding_attention"):
            raise fields.error(f"layer type {name!r} is not supported; supported: full_attention, sliding_attention")
    return tuple(name == "sliding_attention" for name in names)


def _all_turned(fields: Fields, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def _turned_by_list(fields: Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3: ``no_rope_layers`` has a 1 for each layer that has positions; absent, every fourth has none."""
    marks = fields.get("no_rope_layers")
    if marks is None:
        every = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if not isinstance(marks, list) or len(marks) != layers or not set(marks) <= {0, 1}:
        raise fields.error(f"no_rope_layers must list 0 or 1 for each of {layers} layers, got {marks!r}")
    return tuple(map(bool, marks))


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    models: what people call those it has. sliding: the window and the layers that use it. turned: the layers whose
    heads are rotated by their positions. biases: of products, by name: ``ALWAYS``, or the flag of config.json that
    decides; flags that are not named here are ignored. qk_norm: RMS norm over head_dim on q and k before the rotation.
    head_dim, num_kv_heads: what an absent key means (a null one is always derived from the number of heads).
    fused: products that files hold as one tensor, by its name. partial: whether a part of a head may be rotated.
    inside: where config.json has the model's own keys, and what the names of its tensors may begin with; beside:
    what the names of tensors begin with that belong to something else (images), which is not loaded.
    """

    models: str
    sliding: Callable[[Fields, int], Sliding] = _no_window
    turned: Callable[[Fields, int], tuple[bool, ...]] = _all_turned
    biases: Mapping[str, str] = field(default_factory=dict)
    qk_norm: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    fused: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False


_ATTENTION_BIAS = {QKV: "attention_bias", OUTPUT: "attention_bias"}
_ANY_BIAS = {**_ATTENTION_BIAS, GATE_UP: "mlp_bias", DOWN: "mlp_bias"}

FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, Llama 3, SmolLM", biases=_ANY_BIAS),
    "MistralForCausalLM": Family("Mistral", _uniform_window, num_kv_heads=8),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", _window_by_layer, biases={QKV: ALWAYS}),
    "Qwen3ForCausalLM": Family("Qwen3", _window_by_layer, biases=_ATTENTION_BIAS, qk_norm=True, head_dim=128),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        _phi_window,
        fused={QKV: "self_attn.qkv_proj", GATE_UP: "mlp.gate_up_proj"},
        partial=True,
    ),
    "SmolLM3ForCausalLM": Family("SmolLM3", _window_by_layer, _turned_by_list, _ANY_BIAS, num_kv_heads=4),
    "SeedOssForCausalLM": Family(
        "Seed-OSS", biases={**_ANY_BIAS, OUTPUT: "attention_out_bias"}, head_dim=128, num_kv_heads=8
    ),
}
