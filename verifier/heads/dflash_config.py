"""What a DFlash or DSpark head computes, from the config.json of its directory.

Three layouts: the authors' (z-lab: a Qwen3 configuration with ``dflash_config``), speculators' (the layers' own
configuration nested in ``transformer_layer_config``), and transformers' and DeepSpec's (``target_layer_ids`` at the top
level).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foresay.spec.protocols import FeatureRequest
from foresay.spec.shape import MAX_NODES
from foresay.verifier.heads.eagle_config import layer_fields
from foresay.verifier.heads.markov import KINDS, MarkovConfig
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.families.family import layer_types
from foresay.verifier.model.fields import Fields

#: Numbers that other targets scale embeddings and logits by; the targets that are served here have none.
_SCALES = ("input_embedding_scale", "output_multiplier")
_KINDS = (None, "dflash", "dspark")
_ASSISTANT = "muse_glimmer_assistant"


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape and arithmetic of one head.

    layer: the shape of its layers. draft_vocab: rows of its output matrix. names: the features it reads, in the order
    in which they are concatenated. mask: the token of the rows that guess. block: rows of a whole block, its anchor
    first. anchored: whether the anchor's row guesses too. causal: layers whose rows see none behind them. markov: what
    DSpark adds; None of DFlash.
    """

    layer: ModelConfig
    draft_vocab: int
    names: tuple[str, ...]
    mask: int
    block: int
    anchored: bool
    causal: tuple[bool, ...]
    markov: MarkovConfig | None = None

    @property
    def guesses(self) -> int:
        """Tokens that a whole block guesses."""
        return self.block if self.anchored else self.block - 1

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads."""
        return tuple(int(name.removeprefix("layer.")) for name in self.names if name != "final")

    @property
    def needs(self) -> FeatureRequest:
        """What the target's passes must hand over."""
        return FeatureRequest("final" in self.names, self.layers)

    def reading(self, layers: Sequence[int]) -> DFlashConfig:
        """The same, of a head that reads the inputs of these layers."""
        return replace(self, names=tuple(f"layer.{layer}" for layer in layers))

    def other_layers(self, depth: int) -> list[tuple[int, ...]]:
        """How else the layers might be meant, for a target of ``depth``: counted otherwise."""
        named = [tuple(layer + shift for layer in self.layers) for shift in (1, -1)]
        return [layers for layers in named if layers and 0 <= min(layers) <= max(layers) <= depth]

    @classmethod
    def read(cls, directory: Path, target: ModelConfig, layers: Sequence[int] | None = None) -> DFlashConfig:
        """The configuration in ``directory``; ``layers`` overrides the target layers it names.

        Raises ConfigError naming the file and the key.
        """
        fields = Fields.read(directory / "config.json")
        own = fields.section("dflash_config") or Fields({}, fields.where)
        _refuse_unsupported(fields, own)
        inside = layer_fields(fields, directory)
        layer = ModelConfig.of_llama(inside)
        if "vocab_size" in inside.values and layer.vocab_size != target.vocab_size:
            raise fields.error(f"made for a vocabulary of {layer.vocab_size}, but the target's is {target.vocab_size}")
        depth = fields.integer("num_target_layers", own.integer("num_target_layers", target.num_layers))
        if depth != target.num_layers:
            raise fields.error(f"made for a target of {depth} layers, but this one has {target.num_layers}")
        layer, causal = _windows(fields, own, inside, layer)
        source = own if fields.get("block_size") is None else fields
        mask = (own if own.get("mask_token_id") is not None else fields).integer("mask_token_id", minimum=0)
        if mask >= target.vocab_size:
            raise fields.error(f"mask_token_id is {mask}, but the target has {target.vocab_size} tokens")
        found = cls(
            layer=layer,
            draft_vocab=fields.integer("draft_vocab_size", target.vocab_size),
            names=_features(fields, own, layer.num_layers, target.num_layers),
            mask=mask,
            block=source.integer("block_size", minimum=2, most=MAX_NODES),
            anchored=fields.flag("sample_from_anchor", is_dspark(fields)),
            causal=causal,
            markov=_markov(fields, own) if is_dspark(fields) else None,
        )
        return found if layers is None else found.reading(layers)


def is_dflash(fields: Fields) -> bool:
    """Whether a head's configuration is one of the DFlash family."""
    kind = fields.get("speculators_model_type")
    if kind is not None:
        return str(kind).startswith(("dflash", "dspark"))
    names = str(fields.get("architectures") or "")
    return (
        "DFlash" in names
        or "DSpark" in names
        or fields.get("dflash_config") is not None
        or fields.get("model_type") == _ASSISTANT
    )


def is_dspark(fields: Fields) -> bool:
    """Whether it is DSpark's, whatever it is called: one with a Markov head."""
    own = fields.section("dflash_config") or fields
    return "DSpark" in str(fields.get("architectures") or "") or "dspark" in (
        fields.get("speculators_model_type"),
        own.get("projector_type"),
    )


def _markov(fields: Fields, own: Fields) -> MarkovConfig | None:
    """By the defaults of speculators."""
    source = own if own.get("markov_rank") is not None else fields
    kind = str(source.get("markov_head_type") or "vanilla")
    if kind not in KINDS:
        raise fields.error(f"markov_head_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    rank = source.integer("markov_rank", 256, minimum=0)
    return MarkovConfig(kind, rank) if rank else None


def _refuse_unsupported(fields: Fields, own: Fields) -> None:
    kind, names = fields.get("speculators_model_type"), str(fields.get("architectures") or "")
    if kind == "dflash2" or "DFlash2" in names or own.get("selector_rank") is not None:
        raise fields.error("a DFlash2 head (local convolutions, a selector of candidates) is not supported")
    if kind not in _KINDS or own.get("projector_type") not in _KINDS:
        raise fields.error(
            f"a head of type {own.get('projector_type') or kind} is not supported; supported: DFlash and DSpark"
        )
    if own.get("dspark_backbone_conv_enabled"):
        raise fields.error("a DSpark head with convolutions (dspark_backbone_conv_enabled) is not supported")
    if own.get("attention_mode") == "mla" or fields.get("kv_lora_rank") is not None:
        raise fields.error("multi-head latent attention is not supported in a head")
    for key in _SCALES:
        if own.get(key) not in (None, 1, 1.0):
            raise fields.error(f"{key} {own.get(key)} is not supported")
    if own.get("final_logit_softcapping") is not None:
        raise fields.error("final_logit_softcapping is not supported")


def _windows(fields: Fields, own: Fields, inside: Fields, layer: ModelConfig) -> tuple[ModelConfig, tuple[bool, ...]]:
    """The layers with their windows, and which are causal: sliding ones, unless the configuration says otherwise."""
    slides = layer_types(inside) or (False,) * layer.num_layers
    if fields.get("model_type") == _ASSISTANT and inside.get("layer_types") is None:
        slides = (True,) * layer.num_layers
    window = inside.integer("sliding_window") if any(slides) else None
    causal = slides
    if fields.flag("sliding_window_non_causal", False) or fields.get("model_type") == _ASSISTANT:
        causal = (False,) * layer.num_layers
    stated = own.get("causal") if fields.get("is_causal") is None else fields.get("is_causal")
    if stated is not None:
        causal = (bool(stated),) * layer.num_layers
    return layer.with_windows([window if sliding else None for sliding in slides]), causal


def _features(fields: Fields, own: Fields, count: int, depth: int) -> tuple[str, ...]:
    """The features it reads.

    The authors, DeepSpec and transformers number outputs, and read the last one behind the final norm (DeepSpec before
    it); speculators numbers inputs. No ids mean the authors' choice: as many as there are layers, from the second to
    the third from the end.
    """
    key, shift = "target_layer_ids", 1
    if fields.get("speculators_model_type") is not None:
        key, shift = "aux_hidden_state_layer_ids", 0
    ids = own.get(key) if own.get(key) is not None else fields.get(key)
    if ids is None:
        ids = [1 + round(place * (depth - 4) / max(1, count - 1)) for place in range(count)]
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise fields.error(f"{key} must be a list of layer numbers, got {ids!r}")
    if not all(0 <= number + shift <= depth for number in ids):
        raise fields.error(f"{key} is {ids}, but the target has {depth} layers: the head was made for another model")
    normed = bool(shift) and not is_dspark(fields)
    return tuple("final" if normed and number + 1 == depth else f"layer.{number + shift}" for number in ids)
