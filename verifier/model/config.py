"""What the decoder needs to know of a checkpoint, from its config.json and generation_config.json.

The raw JSON is read, as transformers 4 and as transformers 5 write it, without importing torch or transformers. A model
that the decoder would not compute exactly is refused by name here, before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from foresay.verifier.model.errors import UnsupportedArchitecture
from foresay.verifier.model.families import ACTIVATIONS, ALWAYS, FAMILIES, PLAIN, Activation, Family, Norms, unwrapped
from foresay.verifier.model.fields import LARGEST, Fields
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model.quantization_config import read_quantization
from foresay.verifier.model.rope_config import LongScaling, RopeConfig, YarnScaling, read_rope
from foresay.verifier.model.sizes import Product

log = logging.getLogger("foresay.models")

FLOATS = "bfloat16, float16, float32"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of one decoder.

    biases: products that have one, by name.
    qk_norm: RMSNorm over head_dim on q and k before the rotary embedding.
    sliding_window: in the layers that ``sliding_layers`` marks, a key is visible iff
        position(query) - position(key) < sliding_window; None where no layer slides.
    turned_layers: those that rotate queries and keys by their positions.
    max_positions: context length the checkpoint is meant for (with YaRN the extended one).
    dtype: of the checkpoint, in config.json's words ("bfloat16"); "float32" where it names none.
    eos_token_ids: of generation_config.json, else of config.json, else none.
    quantization: of its matrices; None where they are floats.
    fused: products that files hold as one tensor, and what they call it.
    how: how the family norms. activation: what gates go through. embedding_scale: by what embeddings are multiplied.
    query_scale: by what the products of queries and keys are; None: ``head_dim ** -0.5``. local_rope: of the layers
    that slide, if they have one of their own.
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
    biases: frozenset[str]
    qk_norm: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    turned_layers: tuple[bool, ...]
    max_positions: int
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    fused: Mapping[str, str] = field(default_factory=dict)
    how: Norms = PLAIN
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    query_scale: float | None = None
    local_rope: RopeConfig | None = None

    @property
    def scale(self) -> float:
        """By what the products of queries and keys are multiplied."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def rotated(self) -> int:
        """How many numbers of a head are rotated."""
        return int(self.head_dim * self.rope.share)

    def stored(self, product: Product) -> dict[str, int]:
        """The modules that the files have of a product, and the rows of each."""
        if product.name in self.fused:
            return {self.fused[product.name]: product.outer}
        return dict(zip(product.modules, product.rows, strict=True))

    @property
    def norms(self) -> dict[str, int]:
        """The weights of a layer's norms, by name: how many numbers each has."""
        heads = {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim} if self.qk_norm else {}
        names = (BEFORE_ATTENTION, AFTER_ATTENTION, *(SANDWICH if self.how.sandwich else ()))
        return {**dict.fromkeys(names, self.hidden_size), **heads}

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read the model directory ``path``; raises ConfigError, UnsupportedArchitecture among them."""
        directory = Path(path)
        fields = Fields.read(directory / "config.json")
        own = unwrapped(fields)
        model = _model_config(FAMILIES[_architecture(own)], own)
        ids = _eos_token_ids(directory, fields, model.vocab_size)
        return replace(model, eos_token_ids=ids, quantization=read_quantization(own))

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
        return _model_config(FAMILIES["LlamaForCausalLM"], filled)


#: A layer's norms: before attention; before the MLP, or behind attention where there are two more, around the MLP.
BEFORE_ATTENTION, AFTER_ATTENTION = "input_layernorm", "post_attention_layernorm"
SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
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


def _activation(family: Family, fields: Fields) -> Activation:
    key, absent = family.activation
    name = fields.get(key) or fields.get("hidden_act") or absent
    known = {**ACTIVATIONS, absent: absent}
    if known.get(name) != absent:
        wanted = next(each for each, activation in ACTIVATIONS.items() if activation == absent)
        raise fields.error(f"{key} {name!r} is not supported; supported is {wanted}")
    return absent


def _ropes(family: Family, fields: Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of layers that slide, if it is another one."""
    if not family.local_rope:
        return read_rope(fields, family.partial), None
    kinds = fields.section("rope_parameters")
    if kinds is None or "full_attention" not in kinds.values:
        return read_rope(fields), RopeConfig(fields.number("rope_local_base_freq", 10_000.0))
    found = (kinds.section(kind) for kind in ("full_attention", "sliding_attention"))
    full, local = (
        Fields({**fields.values, "rope_parameters": dict(one.values) if one else {}}, fields.where) for one in found
    )
    return read_rope(full), read_rope(local)


def _model_config(family: Family, given: Fields) -> ModelConfig:
    fields = Fields({**family.defaults, **given.values}, given.where)
    for key in family.refused:
        if fields.get(key):
            raise fields.error(f"{key} is not supported")
    layers, heads = fields.integer("num_hidden_layers", most=MOST_LAYERS), fields.integer("num_attention_heads")
    hidden, kv_heads = fields.integer("hidden_size"), _kv_heads(fields, heads)
    biases = frozenset(name for name, flag in family.biases.items() if flag == ALWAYS or fields.flag(flag, False))
    window, sliding_layers = family.sliding(fields, layers)
    head_dim, (rope, local_rope) = _head_dim(fields, heads), _ropes(family, fields)
    _check_rotated(fields, rope, head_dim)
    return ModelConfig(
        architecture=_architecture(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        biases=biases,
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        turned_layers=family.turned(fields, layers),
        max_positions=_max_positions(fields, rope),
        rope=rope,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_token_ids=(),
        fused=family.fused,
        how=family.norms,
        activation=_activation(family, fields),
        embedding_scale=hidden**0.5 if family.scaled else 1.0,
        query_scale=None if family.query_scale is None else fields.number(family.query_scale) ** -0.5,
        local_rope=local_rope,
    )


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; the rotary embedding needs pairs")
    return head_dim


def _check_rotated(fields: Fields, rope: RopeConfig, head_dim: int) -> None:
    """A whole number of pairs, and as many factors."""
    rotated = int(head_dim * rope.share)
    if rotated % 2 or not rotated:
        raise fields.error(f"partial_rotary_factor {rope.share:g} rotates {rotated} of {head_dim} numbers, not pairs")
    match rope.parameters:
        case LongScaling() as scaling if {len(scaling.short), len(scaling.long)} != {rotated // 2}:
            raise fields.error(f"short_factor and long_factor must have {rotated // 2} numbers, one for each pair")


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
