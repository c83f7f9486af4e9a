"""What an EAGLE head computes, from the config.json of its directory.

Three layouts: the authors' (a Llama configuration with ``draft_vocab_size``), SpecForge's (the same with
``eagle_config``), and speculators' (the layer's own configuration nested in ``transformer_layer_config``). EAGLE-1,
EAGLE-2 and HASS heads are one thing: a Llama configuration with one layer and no draft vocabulary, or speculators'
``eagle``. Layers are counted from the tensor names, since published configurations are wrong about them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foresay.spec.protocols import FeatureRequest
from foresay.spec.shape import MAX_NODES
from foresay.verifier.heads.files import stored_names
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.fields import Fields

#: A target shallower than this has no three distinct default layers.
_LEAST_LAYERS = 6
_LAYER = re.compile(r"^(?:model\.)*layers\.(\d+)\.")
#: What a nested Qwen3 configuration leaves out, since it is the class's default.
_QWEN3_DEFAULTS = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape and arithmetic of one head.

    generation: 1 (EAGLE-1 and 2: one feature, the target's own output head) or 3. layer: the shape of its layer.
    draft_vocab: rows of its own output head. aux: the target's layers whose inputs it reads; empty for one that reads
    the state behind the final norm.
    residual_normed: the residual is the hidden state behind ``hidden_norm``. fc_input_normed, fc_normed: a norm over
    all features, or one for each, before they are mixed. output_normed: what is fed back is the state behind ``norm``.
    more_norms, fc_bias: of EAGLE-1, that its file must have three norms more, and a bias beside ``fc``.
    mask, guesses: of P-EAGLE, the token of rows that have none, and the tokens that it was trained to guess at once.
    """

    generation: Literal[1, 3]
    layer: ModelConfig
    draft_vocab: int
    aux: tuple[int, ...]
    residual_normed: bool = False
    fc_input_normed: bool = False
    fc_normed: bool = False
    output_normed: bool = False
    more_norms: bool = False
    fc_bias: bool = False
    mask: int | None = None
    guesses: int = 0

    @property
    def needs(self) -> FeatureRequest:
        """What the target's passes must hand over."""
        return FeatureRequest(final=not self.aux, layers=self.aux)

    @property
    def names(self) -> list[str]:
        """The features by name, in the order in which they are concatenated."""
        return [f"layer.{layer}" for layer in self.aux] or ["final"]

    def other_layers(self, depth: int) -> list[tuple[int, ...]]:
        """How else the layers might be meant, for a target of ``depth``: counted otherwise, or the authors' choice."""
        named = [tuple(layer + shift for layer in self.aux) for shift in (1, -1)]
        if len(self.aux) == 3:
            named += [(2, depth // 2, depth - 3), (3, depth // 2 + 1, depth - 2)]
        return [aux for aux in dict.fromkeys(named) if aux and aux != self.aux and 0 <= min(aux) <= max(aux) <= depth]

    @classmethod
    def read(cls, directory: Path, target: ModelConfig, layers: Sequence[int] | None = None) -> EagleConfig:
        """The configuration in ``directory``; ``layers`` overrides the target layers it names.

        Raises ConfigError naming the file and the key.
        """
        fields = Fields.read(directory / "config.json")
        _refuse_unsupported(fields)
        layer = ModelConfig.of_llama(layer_fields(fields, directory))
        if layer.vocab_size != target.vocab_size:
            raise fields.error(f"made for a vocabulary of {layer.vocab_size}, but the target's is {target.vocab_size}")
        eagle3 = is_eagle3(fields)
        read = fields.integer("target_hidden_size", target.hidden_size if eagle3 else layer.hidden_size)
        if read != target.hidden_size:
            raise fields.error(f"made for a hidden size of {read}, but the target's is {target.hidden_size}")
        if not eagle3:
            more, bias = fields.flag("layernorms", False), fields.flag("fusion_bias", False)
            return cls(1, layer, target.vocab_size, (), more_norms=more, fc_bias=bias)
        flags = _Flags(fields)
        return cls(
            generation=3,
            layer=layer,
            draft_vocab=fields.integer("draft_vocab_size", layer.vocab_size),
            aux=_aux_layers(fields, target.num_layers, layers),
            residual_normed=flags.get("norm_before_residual"),
            fc_input_normed=flags.get("norm_before_fc"),
            fc_normed=flags.get("fc_norm"),
            output_normed=flags.get("norm_output"),
            mask=fields.integer("mask_token_id", minimum=0, most=target.vocab_size - 1) if is_peagle(fields) else None,
            guesses=_guesses(fields) if is_peagle(fields) else 0,
        )


@dataclass(frozen=True, slots=True)
class _Flags:
    """Truth values that stand at the top level or in ``eagle_config``."""

    fields: Fields

    def get(self, key: str) -> bool:
        nested = self.fields.section("eagle_config")
        source = nested if nested is not None and nested.get(key) is not None else self.fields
        return source.flag(key, False)


def is_eagle3(fields: Fields) -> bool:
    """Whether a head's configuration is an EAGLE-3 one."""
    if fields.get("speculators_model_type") is not None:
        return fields.get("speculators_model_type") in ("eagle3", "peagle")
    names = str(fields.get("architectures") or "").lower()
    keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    return "eagle3" in names or any(map(fields.get, keys))


def is_peagle(fields: Fields) -> bool:
    """Whether it is one that drafts in parallel, as speculators writes it."""
    return bool(fields.get("speculators_model_type") == "peagle")


def _guesses(fields: Fields) -> int:
    """As many as its proposal has."""
    proposed = (fields.section("speculators_config") or fields).get("proposal_methods")
    first = proposed[0] if isinstance(proposed, list) and proposed else {}
    return Fields(first if isinstance(first, dict) else {}, fields.where).integer(
        "speculative_tokens", 8, most=MAX_NODES - 1
    )


def _refuse_unsupported(fields: Fields) -> None:
    kind = fields.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3", "peagle"):
        raise fields.error(
            f"a head of type {kind} is not supported; supported: eagle, eagle3, peagle, dflash, dspark and Medusa heads"
        )
    if fields.get("parallel_drafting") or (fields.section("eagle_config") or fields).get("parallel_drafting"):
        raise fields.error("a head that drafts in parallel (parallel_drafting) is not supported")
    if fields.get("kv_lora_rank") is not None:
        raise fields.error("multi-head latent attention (kv_lora_rank) is not supported in a head")


def layer_fields(fields: Fields, directory: Path) -> Fields:
    """Where the layers' own keys stand, with the number of layers that there are."""
    nested = fields.section("transformer_layer_config")
    source = fields if nested is None else nested
    defaults = _QWEN3_DEFAULTS if source.get("model_type") == "qwen3" else {}
    return Fields({**defaults, **source.values, "num_hidden_layers": _layer_count(directory)}, source.where)


def _layer_count(directory: Path) -> int:
    """The layers by the tensors' names; a pickle, whose names are not read here, has one."""
    found = (_LAYER.match(name) for name in stored_names(directory))
    return max((int(match[1]) for match in found if match), default=0) + 1


def _aux_layers(fields: Fields, depth: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The target layers whose inputs the head reads.

    Published ids mean "input of layer i" (vLLM, speculators) or "output of layer i" (SGLang), and files do not say
    which; the latter are known by their first id, 1. No ids mean the authors' choice.
    """
    nested = fields.section("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    if nested is not None and not _uses_layers(nested) and layers is None:
        return ()
    ids = list(layers) if layers is not None else fields.get(key) or (nested.get(key) if nested is not None else None)
    if ids is None:
        if depth < _LEAST_LAYERS:
            raise fields.error(
                f"{key} is missing, and a target of {depth} layers has no default layers; name them with --draft-layers"
            )
        return 2, depth // 2, depth - 3
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise fields.error(f"{key} must be a list of layer numbers, got {ids!r}")
    shift = 1 if layers is None and ids[0] == 1 else 0
    if not all(0 <= number + shift <= depth for number in ids):
        raise fields.error(f"{key} is {ids}, but the target has {depth} layers: the head was made for another model")
    return tuple(number + shift for number in ids)


def _uses_layers(nested: Fields) -> bool:
    return nested.flag("use_aux_hidden_state", True)
