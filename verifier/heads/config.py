"""The shape and arithmetic of a head over paged KV, from its config.json (:mod:`foresay.verifier.heads.layouts`)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foresay.spec.protocols import FeatureRequest
from foresay.spec.shape import MAX_NODES
from foresay.verifier.heads.layouts import Published
from foresay.verifier.heads.markov import KINDS, MarkovConfig
from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.families.family import layer_types
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Layer, Stack
from foresay.verifier.model.mtp_layout import EMBEDDING, HIDDEN, MtpLayout, mtp_layer
from foresay.verifier.model.products import Vector

#: A target with fewer layers has no three distinct default layers.
_LEAST_LAYERS = 6
#: EAGLE's flags in config.json. EAGLE-3: the residual is the hidden state after ``hidden_norm``; all features are
#: normalised before ``fc``, together or each separately; the state after ``norm`` is fed back. EAGLE-1, what its file
#: must have: a bias of ``fc``, three more norms.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fusion_bias", "layernorms")
#: A head from the target's checkpoint: EAGLE-1's arithmetic, but hidden states are normalised too; and one that reads
#: those before the last norm.
MTP, RAW = "mtp", "raw"
Scales = tuple[float, float, float | None]
#: P-EAGLE's replacement for features.
MASK = "mask_hidden"
#: The norms of both halves of the first layer's input in EAGLE-3: of the token's embedding, and of the state.
FIRST_NORMS = "model.layers.0.input_layernorm", "model.layers.0.hidden_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape and arithmetic of one head.

    layer: the shape of its layers. draft_vocab: rows of its output matrix. names: the features it reads, in the order
    of their concatenation. generation: of EAGLE, 1 (and 2: one feature, the target's output matrix) or 3; 0 for DFlash.
    flags: those of :data:`FLAGS` that are set. mask, guesses: of P-EAGLE and DFlash, the mask token, and how many
    tokens are guessed at once. anchored: whether the row of DFlash's anchor guesses too. markov: what DSpark adds; None
    for DFlash. scales: of its own embedding, and of logits, which may have a cap.
    """

    layer: ModelConfig
    draft_vocab: int
    names: tuple[str, ...]
    generation: int = 3
    flags: frozenset[str] = frozenset()
    mask: int | None = None
    guesses: int = 0
    anchored: bool = False
    markov: MarkovConfig | None = None
    scales: Scales = (1.0, 1.0, None)

    @property
    def block(self) -> int:
        """Rows of a whole block, its anchor first."""
        return self.guesses + (not self.anchored)

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads."""
        return tuple(int(name.removeprefix("layer.")) for name in self.names if name != "final")

    @property
    def needs(self) -> FeatureRequest:
        """The features that the target's passes must return."""
        return FeatureRequest("final" in self.names, self.layers)

    @classmethod
    def of_mtp(cls, target: ModelConfig, layout: MtpLayout) -> HeadConfig:
        """The configuration of a checkpoint's extra (MTP) layer: one with attention, over the normalised token
        embedding and the state after or before the last norm."""
        own = mtp_layer(target)
        assert own is not None, "a layout was found"
        return cls(
            layer=with_layers(target, [replace(own, mixer=replace(own.attention, first=1))]),
            draft_vocab=target.vocab_size,
            names=(f"layer.{target.num_layers}" if layout.raw else "final",),
            generation=1,
            flags=frozenset({MTP, RAW} if layout.raw else {MTP}),
        )

    def norms(self, width: int, stored: Container[str]) -> dict[str, int]:
        """The norms outside the layers, with their sizes; including the two in EAGLE-3's first layer. width: of a
        feature. stored: the names of tensors."""
        hidden, count = self.layer.hidden_size, len(self.names)
        if self.generation == 0:
            return dict.fromkeys((HIDDEN, FINAL_NORM), hidden)
        if self.generation == 1:
            if MTP in self.flags:
                last = (FINAL_NORM,) if f"{FINAL_NORM}.weight" in stored else ()  # else the target's is used
                return dict.fromkeys((EMBEDDING, HIDDEN, *last), hidden)
            more = self.layer.first.norms.before_attention is not None
            return dict.fromkeys((EMBEDDING, FINAL_NORM) if more else (), hidden)
        sizes = dict.fromkeys((*FIRST_NORMS, FINAL_NORM), hidden)
        each = (f"fc_norm.{index}" for index in range(count if "fc_norm" in self.flags else 0))
        whole = {"input_norm": width * count} if "norm_before_fc" in self.flags else {}
        return {**sizes, **dict.fromkeys(each, width), **whole}

    def vectors(self, width: int, stored: Container[str] = ()) -> Iterator[Vector]:
        """Its vectors outside the layers, see :meth:`norms`: ``pair`` reads norms in the dtype of activations."""
        kind = self.layer.stack.norm
        for name, size in self.norms(width, stored).items():
            yield from (kind if name == FINAL_NORM else replace(kind, wide=False)).vectors(name, size)
        if self.generation == 3 and self.mask is not None:
            yield Vector(MASK, 1, more=(1, width * len(self.names)))

    @classmethod
    def read(cls, directory: Path, target: ModelConfig) -> HeadConfig:
        """The configuration in ``directory``.

        Raises ConfigError, which names the file and the key.
        """
        read = Published.read(directory)
        fields, layer = read.fields, ModelConfig.from_llama(read.layer)
        if "vocab_size" in read.layer.values or read.layout.kind == "eagle":
            _check(fields, "made for a vocabulary of {}, but the target's is {}", layer.vocab_size, target.vocab_size)
        made = (_dflash if read.layout.kind == "dflash" else _eagle)(read, layer, target)
        return replace(made, scales=_scales(fields, target.stack))


def _eagle(read: Published, layer: ModelConfig, target: ModelConfig) -> HeadConfig:
    fields, layout, depth, vocab = read.fields, read.layout, target.num_layers, layer.vocab_size
    if fields.get("parallel_drafting"):
        raise fields.error("a head that drafts in parallel (parallel_drafting) is not supported")
    own = layer.hidden_size if layout.generation == 1 else target.hidden_size
    made = fields.integer("target_hidden_size", own)
    _check(fields, "made for a hidden size of {}, but the target's is {}", made, target.hidden_size)
    names: tuple[str, ...] = ("final",)
    if layout.generation == 3 and fields.flag("use_aux_hidden_state", True):
        if fields.get(layout.mixes) is None and depth < _LEAST_LAYERS:
            raise fields.error(f"{layout.mixes} is missing, and a target of {depth} layers has no default layers")
        names = read.features([2, depth // 2, depth - 3], depth)
    return HeadConfig(
        layer=continued(layer, layout.generation),
        draft_vocab=vocab if layout.generation == 1 else fields.integer("draft_vocab_size", vocab),
        names=names,
        generation=layout.generation,
        flags=frozenset(key for key in FLAGS if fields.flag(key, False)),
        mask=fields.integer("mask_token_id", minimum=0, most=target.vocab_size - 1) if layout.parallel else None,
        guesses=_proposed(fields) if layout.parallel else 0,
    )


def with_layers(model: ModelConfig, layers: Sequence[Layer]) -> ModelConfig:
    """The same model with these layers."""
    return replace(model, stack=replace(model.stack, layers=tuple(layers)))


def continued(model: ModelConfig, generation: int) -> ModelConfig:
    """Layers whose rows continue from the feature of the position before. The first one's input is normed before, in
    EAGLE-3 each half separately."""
    layers = [replace(layer, mixer=replace(layer.attention, first=1)) for layer in model.stack.layers]
    read = replace(layers[0].attention, width=2 * model.hidden_size if generation == 3 else None)
    layers[0] = replace(layers[0], mixer=read, norms=replace(layers[0].norms, before_attention=None))
    return with_layers(model, layers)


def _proposed(fields: Fields) -> int:
    """The number of tokens that the head proposes."""
    proposed = (fields.section("speculators_config") or fields).get("proposal_methods")
    first = proposed[0] if isinstance(proposed, list) and proposed else {}
    own = Fields(first if isinstance(first, dict) else {}, fields.where)
    return own.integer("speculative_tokens", 8, most=MAX_NODES - 1)


def _dflash(read: Published, layer: ModelConfig, target: ModelConfig) -> HeadConfig:
    fields, depth = read.fields, target.num_layers
    made = fields.integer("num_target_layers", depth)
    _check(fields, "made for a target of {} layers, but this one has {}", made, depth)
    layer = _windows(read, layer)
    if (mask := fields.integer("mask_token_id", minimum=0)) >= target.vocab_size:
        raise fields.error(f"mask_token_id is {mask}, but the target has {target.vocab_size} tokens")
    # The authors' choice: as many as the head has layers, from the second to the third from the end.
    most = max(1, layer.num_layers - 1)
    chosen = [1 + round(number * (depth - 4) / most) for number in range(layer.num_layers)]
    anchored = fields.flag("sample_from_anchor", read.layout.anchored)
    return HeadConfig(
        layer=layer,
        draft_vocab=fields.integer("draft_vocab_size", target.vocab_size),
        names=read.features(chosen, depth),
        generation=0,
        mask=mask,
        guesses=fields.integer("block_size", minimum=2, most=MAX_NODES) - (not anchored),
        anchored=anchored,
        markov=_markov(fields) if read.layout.markov else None,
    )


def _check(fields: Fields, what: str, made: int, target: int) -> None:
    if made != target:
        raise fields.error(what.format(made, target))


def _scales(fields: Fields, target: Stack) -> Scales:
    """The same as the target's, which may be shared."""
    keys = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
    theirs = [fields.optional_number(key) for key in keys]
    ours = target.embedding_scale, target.logit_scale, target.logit_cap
    for key, own, shared in zip(keys, theirs, ours, strict=True):
        if own is not None and not math.isclose(own, shared or 0.0, rel_tol=1e-3):
            raise fields.error(f"{key} is {own:g}, but the target's is {shared}: the head was made for another model")
    return theirs[0] or 1.0, theirs[1] or 1.0, theirs[2]


def _markov(fields: Fields) -> MarkovConfig | None:
    """With speculators' defaults."""
    kind = str(fields.get("markov_head_type") or "vanilla")
    if kind not in KINDS:
        raise fields.error(f"markov_head_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    rank = fields.integer("markov_rank", 256, minimum=0)
    return MarkovConfig(kind, rank) if rank else None


def _windows(read: Published, layer: ModelConfig) -> ModelConfig:
    """The layers with their windows; sliding-window ones are causal, unless the configuration says otherwise."""
    fields, count = read.fields, layer.num_layers
    slides = layer_types(read.layer) or (read.layout.slides,) * count
    window = read.layer.integer("sliding_window") if any(slides) else None
    causal = slides if read.layout.causal and not fields.flag("sliding_window_non_causal", False) else (False,) * count
    for key in ("causal", "is_causal"):
        causal = causal if fields.get(key) is None else (bool(fields.get(key)),) * count
    both = zip(layer.stack.layers, slides, causal, strict=True)
    nodes = ((one, replace(one.attention, window=window if slid else None, causal=own)) for one, slid, own in both)
    return with_layers(layer, [replace(one, mixer=node) for one, node in nodes])
