"""A checkpoint's configuration for the decoder, from its config.json and generation_config.json; and its size.

The raw JSON is read, in the formats of transformers 4 and 5, without importing torch or transformers. A model that the
decoder would not compute exactly is refused here, before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from foresay.verifier.model.errors import UnsupportedArchitecture
from foresay.verifier.model.families import FAMILIES, unwrapped
from foresay.verifier.model.families.family import Family
from foresay.verifier.model.fields import LARGEST, Fields
from foresay.verifier.model.layers import Attention, Layer, Stack
from foresay.verifier.model.products import Product
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model.quantization_config import read_quantization
from foresay.verifier.model.recurrences import Recurrence
from foresay.verifier.model.rope_config import RopeConfig, YarnScaling

log = logging.getLogger("foresay.models")

FINAL_NORM = "model.norm"
FLOATS = "bfloat16, float16, float32"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder.

    stack: its layers and their arithmetic.
    max_positions: the checkpoint's context length (with YaRN the extended one).
    dtype: of the checkpoint, as in config.json ("bfloat16"); "float32" if it names none.
    eos_token_ids: of generation_config.json, else of config.json, else none.
    quantization: of its matrices; None if they are floats.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    stack: Stack
    tie_word_embeddings: bool
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.stack.layers)

    @property
    def first(self) -> Layer:
        """The first layer, for models whose layers have one shape."""
        return self.stack.layers[0]

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has one."""
        return self.stack.attentions[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """The largest inner width of a layer's MLP and experts that a row passes through."""
        return max(layer.width for layer in self.stack.layers)

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding; that of the full-attention layers, if others have their own."""
        whole = [one.rope for one in self.stack.attentions if one.window is None]
        return next(rope for rope in (*whole, *self.ropes) if rope is not None)

    @property
    def sliding_window(self) -> int | None:
        """The widest sliding window of its layers; None if there is none."""
        return max((one.window or 0 for one in self.stack.attentions), default=0) or None

    @property
    def rms_norm_eps(self) -> float:
        """The epsilon of the last norm."""
        return self.stack.norm.eps

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The distinct rotary embeddings of its layers; None is included if a layer has none."""
        return tuple(dict.fromkeys(one.rope for one in self.stack.attentions))

    @property
    def less_one(self) -> frozenset[str]:
        """The tensors that safetensors files store minus one, and GGUF files as they are."""
        inside = (
            (f"model.layers.{number}.{vector.name}", vector)
            for number, layer in enumerate(self.stack.layers)
            for vector in layer.vectors(self.hidden_size)
        )
        last, own = self.stack.norm.vectors(FINAL_NORM, self.hidden_size), self.stack.parameters(self.hidden_size)
        outside = ((vector.name, vector) for vector in (*last, *own.vectors))
        return frozenset(name for name, vector in (*inside, *outside) if vector.less_one)

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read the model directory ``path``; raises ConfigError, for example UnsupportedArchitecture."""
        directory = Path(path)
        fields = Fields.read(directory / "config.json")
        own = unwrapped(fields)
        model = cls.read(own)
        ids = _eos_token_ids(directory, (fields, own), model.vocab_size)
        return replace(model, eos_token_ids=ids, quantization=read_quantization(own, directory))

    @classmethod
    def read(cls, fields: Fields) -> ModelConfig:
        """The model's layers, from these keys of a config.json."""
        return _model_config(FAMILIES[_architecture(fields)], fields)

    @classmethod
    def from_llama(cls, fields: Fields) -> ModelConfig:
        """The shape of Llama layers that are not a whole model (a head), with Llama's defaults for missing keys."""
        values = {**_LLAMA_DEFAULTS, **fields.values, "architectures": ["LlamaForCausalLM"]}
        filled = Fields(values, fields.where)
        found = read_quantization(filled)
        if found is not None and not all(scheme.plain_int8 for _, scheme in found.all_rules):
            raise filled.error(
                f"a head's weights in {found} are not supported; supported: {FLOATS}, int8 (int-quantized)"
            )
        return _model_config(FAMILIES["LlamaForCausalLM"], filled)


#: Class defaults that transformers leaves out of a nested configuration.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures is missing, so the kind of model is unknown")
    if names[0] not in FAMILIES:
        supported = (f"{name} ({family.models})" for name, family in FAMILIES.items())
        raise UnsupportedArchitecture(str(names[0]), supported, fields.where)
    return str(names[0])


def _model_config(family: Family, given: Fields) -> ModelConfig:
    fields = Fields({**family.defaults, **given.values}, given.where)
    stack = family.stack(fields)
    return ModelConfig(
        architecture=_architecture(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        stack=stack,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=_max_positions(fields, stack),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_token_ids=(),
    )


def _max_positions(fields: Fields, stack: Stack) -> int:
    """YaRN checkpoints may give the length before the extension (Qwen) or after it; the longer one counts."""
    positions = fields.integer("max_position_embeddings")
    for rope in {one.rope for one in stack.attentions}:
        match rope and rope.parameters:
            case YarnScaling(factor=factor, original_positions=original):
                if factor * original > LARGEST:
                    raise fields.error(f"factor {factor:g} times {original} positions is more than {LARGEST}")
                positions = max(positions, int(factor * original))
    return positions


def _eos_token_ids(directory: Path, fields: tuple[Fields, ...], vocab_size: int) -> tuple[int, ...]:
    """Only those in the vocabulary: others can never be sampled, and must not be looked up."""
    generation = directory / "generation_config.json"
    sources = [Fields.read(generation)] if generation.exists() else []
    for source in (*sources, *fields):
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


def products(model: ModelConfig) -> Iterator[tuple[int, Product]]:
    """The products of all layers, each with the number of its layer."""
    for number, layer in enumerate(model.stack.layers):
        for product in layer.products(model.hidden_size):
            yield number, product


def matrices(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Each product's first module, with its inner and outer width; the output head last."""
    for number, product in products(model):
        yield f"model.layers.{number}.{next(iter(product.rows))}", product.inner, product.outer
    for made in model.stack.parameters(model.hidden_size).products:
        yield made.name, made.inner, made.outer
    yield "lm_head", model.hidden_size, model.vocab_size


def table_numbers(model: ModelConfig) -> int:
    """How many numbers the table of embeddings has that layers have of their own; 0 if they have none."""
    return 0 if (own := model.stack.embedding) is None else prod(own.table(model.num_layers))


def parameters(model: ModelConfig) -> int:
    """The approximate number of weights, for planning; an output head tied to the embedding is packed in addition to
    it."""
    inside = sum(inner * outer for _, inner, outer in matrices(model))
    return inside + model.vocab_size * model.hidden_size + table_numbers(model)


def unused_parameters(model: ModelConfig) -> int:
    """The number of weights that a row does not use: those of experts that are not chosen, and of other rows of a table
    of embeddings that layers have of their own."""
    own = model.stack.embedding
    others = 0 if own is None else table_numbers(model) // own.tokens * (own.tokens - 1)
    return others + sum(
        product.inner * product.outer * (product.experts - product.top_k) // product.experts
        for _, product in products(model)
        if product.experts
    )


def stored_parameters(model: ModelConfig) -> int:
    """The approximate number of weights in the files: a tied output head is not stored."""
    return parameters(model) - model.vocab_size * model.hidden_size * model.tie_word_embeddings


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of a token: ``heads`` heads, each a key and a value of these widths. window: how many
    positions a row attends to, including its own; None: all up to it. state: what a recurrence, alongside heads or
    without any, keeps of a text. A layer that reads another's keys and values has no heads."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    state: Recurrence | None = None

    @property
    def numbers(self) -> int:
        """How many numbers per token."""
        return self.heads * (self.key_dim + self.value_dim)


def window_shapes(model: ModelConfig) -> tuple[KVShape, ...]:
    """What each layer of a model keeps and attends to."""
    return tuple(
        KVShape(one.kv_heads, one.head_dim, one.cached_value_dim, one.window, layer.recurrence)
        if isinstance(one := layer.mixer, Attention) and one.source is None
        else KVShape(0, 0, 0, state=layer.recurrence)
        for layer in model.stack.layers
    )


def kv_shapes(model: ModelConfig) -> tuple[KVShape, ...]:
    """The same with full attention in all layers."""
    return tuple(replace(shape, window=None) for shape in window_shapes(model))


def numbers_per_token(model: ModelConfig) -> int:
    """How many numbers the KV cache keeps of a token."""
    return sum(shape.numbers for shape in kv_shapes(model))
