"""The families of decoders, by their names in config.json: what each fixes, and what it lets config.json choose.

All are stacks of attention and a gated MLP with RMS norms before both. An entry says where a family departs from that:
biases, norms of heads, windows, layers without positions, matrices that files hold as one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foresay.verifier.model.fields import Fields
from foresay.verifier.model.sizes import DOWN, GATE_UP, OUTPUT, QKV

Activation = Literal["silu", "gelu"]
#: Of config.json's names for what gates go through, those that are known, and their own here.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
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


def _gemma_window(fields: Fields, layers: int) -> Sliding:
    """Gemma 3: by layer_types, else every layer but each sixth (``sliding_window_pattern``)."""
    pattern = fields.integer("sliding_window_pattern", 6)
    slides = layer_types(fields, layers) or tuple((layer + 1) % pattern != 0 for layer in range(layers))
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
class Norms:
    """How a family norms. plus_one: files keep weights less one, and they are multiplied in fp32, before the result is
    rounded. sandwich: what attention and the MLP put out is normed too, before it is added."""

    plus_one: bool = False
    sandwich: bool = False


#: Of most families.
PLAIN = Norms()


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    models: what people call those it has. sliding: the window and the layers that use it. turned: the layers whose
    heads are rotated by their positions. biases: of products, by name: ``ALWAYS``, or the flag of config.json that
    decides; flags that are not named here are ignored. qk_norm: RMS norm over head_dim on q and k before the rotation.
    defaults: what absent keys of config.json mean (null ones are derived). refused: keys that change what is computed,
    so that they must be false or null. fused: products that files hold as one tensor, by its name. partial: whether a
    part of a head may be rotated. norms: see there. activation: config.json's key for what gates go through, and what
    an absent one means. scaled: whether embeddings are multiplied by the root of the hidden size. query_scale: the key
    of the number of which attention's scale is the inverse root; None: head_dim. local_rope: whether layers with a
    window have a rotary embedding of their own.
    """

    models: str
    sliding: Callable[[Fields, int], Sliding] = _no_window
    turned: Callable[[Fields, int], tuple[bool, ...]] = _all_turned
    biases: Mapping[str, str] = field(default_factory=dict)
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    fused: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    norms: Norms = PLAIN
    activation: tuple[str, Activation] = ("hidden_act", "silu")
    scaled: bool = False
    query_scale: str | None = None
    local_rope: bool = False


_ATTENTION_BIAS = {QKV: "attention_bias", OUTPUT: "attention_bias"}
_ANY_BIAS = {**_ATTENTION_BIAS, GATE_UP: "mlp_bias", DOWN: "mlp_bias"}

#: What the configurations of its larger models leave out.
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

FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, Llama 3, SmolLM", biases=_ANY_BIAS),
    "MistralForCausalLM": Family("Mistral", _uniform_window, defaults={"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", _window_by_layer, biases={QKV: ALWAYS}),
    "Qwen3ForCausalLM": Family(
        "Qwen3", _window_by_layer, biases=_ATTENTION_BIAS, qk_norm=True, defaults={"head_dim": 128}
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        _phi_window,
        fused={QKV: "self_attn.qkv_proj", GATE_UP: "mlp.gate_up_proj"},
        partial=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3", _window_by_layer, _turned_by_list, _ANY_BIAS, defaults={"num_key_value_heads": 4}
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        biases={**_ANY_BIAS, OUTPUT: "attention_out_bias"},
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3",
        _gemma_window,
        biases=_ATTENTION_BIAS,
        qk_norm=True,
        defaults=_GEMMA3,
        refused=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
        norms=Norms(plus_one=True, sandwich=True),
        activation=("hidden_activation", "gelu"),
        scaled=True,
        query_scale="query_pre_attn_scalar",
        local_rope=True,
    ),
}

#: Models of texts and images, of which the texts' part is loaded: by the ``model_type`` of its ``text_config``.
WRAPPED = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
INSIDE = {"gemma3_text": "Gemma3ForCausalLM", "mistral": "MistralForCausalLM"}


def unwrapped(fields: Fields) -> Fields:
    """The configuration of the model of texts, which is all of it in most."""
    names, inside = fields.get("architectures"), fields.section("text_config")
    if not isinstance(names, list) or names[:1] not in [[name] for name in WRAPPED] or inside is None:
        return fields
    kind = inside.get("model_type")
    if kind not in INSIDE:
        raise inside.error(f"model_type {kind!r} is not supported; supported: {', '.join(INSIDE)}")
    outside = {
        key: fields.values[key]
        for key in ("eos_token_id", "quantization_config", "dtype", "torch_dtype")
        if fields.get(key)
    }
    return Fields({**outside, **inside.values, "architectures": [INSIDE[kind]]}, inside.where)
