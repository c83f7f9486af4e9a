"""What the decoder needs to know of a checkpoint, from its config.json and generation_config.json.

The raw JSON is read, as transformers 4 and as transformers 5 write it, without importing torch or transformers. A model
that the decoder would not compute exactly is refused by name here, before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from foresay.verifier.model.errors import UnsupportedArchitecture
from foresay.verifier.model.fields import LARGEST, Fields
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model.quantization_config import read_quantization
from foresay.verifier.model.rope_config import RopeConfig, YarnScaling, read_rope

log = logging.getLogger("foresay.models")

FLOATS = "bfloat16, float16, float32"
Sliding = tuple[int | None, tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of one decoder.

    attention_bias, output_bias, mlp_bias: biases on q, k and v, on the attention output, on the three MLP matrices.
    qk_norm: RMSNorm over head_dim on q and k before the rotary embedding.
    sliding_window: in the layers that ``sliding_layers`` marks, a key is visible iff
        position(query) - position(key) < sliding_window; None where no layer slides.
    max_positions: context length the checkpoint is meant for (with YaRN the extended one).
    dtype: of the checkpoint, in config.json's words ("bfloat16"); "float32" where it names none.
    eos_token_ids: of generation_config.json, else of config.json, else none.
    quantization: of its matrices; None where they are floats.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    max_positions: int
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read the model directory ``path``; raises ConfigError, UnsupportedArchitecture among them."""
        directory = Path(path)
        fields = Fields.read(directory / "config.json")
        family = FAMILIES[_architecture(fields)]
        _refuse_unsupported(fields)
        model = _model_config(family, fields, ())
        ids = _eos_token_ids(directory, fields, model.vocab_size)
        return replace(model, eos_token_ids=ids, quantization=read_quantization(fields))

    @classmethod
    def of_llama(cls, fields: Fields) -> ModelConfig:
        """The shape of Llama layers that are no model of their own (a head), with Llama's defaults where keys lack."""
        values = {**_LLAMA_DEFAULTS, **fields.values, "architectures": ["LlamaForCausalLM"]}
        filled = Fields(values, fields.where)
        found = read_quantization(filled)
        if found is not None and not all(scheme.plain_int8 for _, scheme in found.rules):
            raise filled.error(
                f"a head's weights in {found} are not supported; supported: {FLOATS}, int8 (int-quantized)"
            )
        _refuse_unsupported(filled)
        return _model_config(FAMILIES["LlamaForCausalLM"], filled, ())


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and what it lets config.json choose.

    qkv_bias: biases on q, k and v alone, whatever the configuration says.
    bias_flags: ``attention_bias`` (q, k, v and the output) and ``mlp_bias`` are read; the others ignore such keys.
    head_dim, num_kv_heads: what an absent key means (a null one is always derived from the number of heads).
    sliding: the window and the layers that use it.
    """

    models: str
    sliding: Callable[[Fields, int], Sliding]
    qkv_bias: bool = False
    bias_flags: tuple[str, ...] = ()
    qk_norm: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None


def _no_window(fields: Fields, layers: int) -> Sliding:
    return None, (False,) * layers


def _uniform_window(fields: Fields, layers: int) -> Sliding:
    """Mistral: every layer slides, or none where the window is null. An absent key means the window of v0.1."""
    window = None if fields.values.get("sliding_window", 4096) is None else fields.integer("sliding_window", 4096)
    slides = (window is not None,) * layers
    if layer_types(fields, layers) not in (None, slides):
        raise fields.error("layer_types that differ from sliding_window are not supported for this architecture")
    return window, slides


def _window_by_layer(fields: Fields, layers: int) -> Sliding:
    """Qwen: off unless use_sliding_window; then layer_types says where, else the layers from max_window_layers on."""
    enabled = fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None
    first = fields.integer("max_window_layers", 28, minimum=0) if enabled else layers
    slides = layer_types(fields, layers) or tuple(layer >= first for layer in range(layers))
    if any(slides) and not enabled:
        raise fields.error("layer_types has sliding layers, but use_sliding_window and sliding_window name no window")
    return fields.integer("sliding_window", 4096) if any(slides) else None, slides


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


FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, Llama 3, SmolLM", _no_window, bias_flags=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family("Mistral", _uniform_window, num_kv_heads=8),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", _window_by_layer, qkv_bias=True),
    "Qwen3ForCausalLM": Family("Qwen3", _window_by_layer, bias_flags=("attention_bias",), qk_norm=True, head_dim=128),
}


#: More than any model has: each takes memory long before the weights are looked at.
MOST_LAYERS = 10_000

#: What transformers leaves out of a nested configuration, since it is the class's default.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise fields.error("architectures is missing, so the kind of model is unknown")
    if names[0] not in FAMILIES:
        supported = (f"{name} ({family.models})" for name, family in FAMILIES.items())
        raise UnsupportedArchitecture(str(names[0]), supported, fields.where)
    return str(names[0])


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act {activation!r} is not supported; supported is silu")


def _model_config(family: Family, fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    layers, heads = fields.integer("num_hidden_layers", most=MOST_LAYERS), fields.integer("num_attention_heads")
    kv_heads = _kv_heads(family, fields, heads)
    attention_bias = "attention_bias" in family.bias_flags and fields.flag("attention_bias", False)
    window, sliding_layers = family.sliding(fields, layers)
    rope = read_rope(fields)
    return ModelConfig(
        architecture=_architecture(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(family, fields, heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias="mlp_bias" in family.bias_flags and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        max_positions=_max_positions(fields, rope),
        rope=rope,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids,
    )


def _kv_heads(family: Family, fields: Fields, heads: int) -> int:
    absent = None if "num_key_value_heads" in fields.values else family.num_kv_heads
    kv_heads = fields.integer("num_key_value_heads", absent or heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _head_dim(family: Family, fields: Fields, heads: int) -> int:
    absent = None if "head_dim" in fields.values else family.head_dim
    head_dim = fields.integer("head_dim", absent or fields.integer("hidden_size") // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; the rotary embedding needs pairs")
    return head_dim


def _max_positions(fields: Fields, rope: RopeConfig) -> int:
    """YaRN checkpoints may give the length before the extension (Qwen) or after it; the longer one holds."""
    positions = fields.integer("max_position_embeddings")
    match rope.parameters:
        case YarnScaling(factor=factor, original_positions=original):
            if factor * original > LARGEST:
                raise fields.error(f"factor {factor:g} times {original} positions is more than {LARGEST}")
            return max(positions, int(factor * original))
    return positions


def _eos_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Those the model has: others can never be sampled, and must not be looked up."""
    generation = directory / "generation_config.json"
    sources = [Fields.read(generation)] if generation.exists() else []
    for source in (*sources, fields):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise source.error(f"eos_token_id must be a token id or a list of them, got {value!r}")
        beyond = [token for token in ids if not 0 <= token < vocab_size]
        if beyond:
            named = ", ".join(map(str, beyond[:8]))
            log.warning("%s: eos_token_id %s left out: the model has %d tokens", source.where, named, vocab_size)
        return tuple(token for token in ids if token not in beyond)
    return ()
