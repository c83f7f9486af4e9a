"""One decoder for targets and draft models of all families (:mod:`foresay.verifier.model.families`).

The forward pass is :func:`foresay.verifier.model.forward.forward`. Legend: H hidden width, Q query heads, G kv
heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.feed_forward import MLP, Experts
from foresay.verifier.model.layer_inputs import PackedGate, PackedInputs
from foresay.verifier.model.layers import SCALAR, SINKS, Attention, Layer, Mixer, Norms
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.moe import PackedDenseMLP, PackedExperts
from foresay.verifier.model.per_layer import PROJECTION
from foresay.verifier.model.products import (
    DOWN,
    GATE_UP,
    HEAD_GATE,
    MIXED,
    OUTPUT,
    QKV,
    RATES,
    RECURRENT,
    SHARED_DOWN,
    SHARED_GATE_UP,
    NormKind,
)
from foresay.verifier.model.recurrences import (
    DECAY,
    HEAD_NORM,
    SCAN,
    SHIFT,
    SHORT_TAPS,
    TAPS,
    GatedDelta,
    Mamba2,
    ShortConv,
)
from foresay.verifier.model.rope import RopeTable, half_split_order
from foresay.verifier.model.rope_config import QueryScaling, RopeConfig
from foresay.verifier.model.weight_absorption import PackedMLA
from foresay.verifier.model.weights import LayerWeights, ModelWeights
from foresay.verifier.ops.records import DeltaWeights, Gate, Norm, QKNorms, Rotation, Scan


@dataclass(slots=True)
class PackedLayer:
    """The weights of one layer (:class:`~foresay.verifier.model.layers.Layer`), packed. qk_norms: the norms of queries
    and of keys. sinks: fp32[Q]. head_gate: None where heads have no gates; for a recurrent layer the product of its
    rates, while qkv is the product of its other inputs. delta: a recurrent layer's other weights; taps: of a short
    convolution, fp32[T, C]. experts: for a mixture layer, whose experts are all in gate_up and down. In a layer that is
    only an MLP or experts, qkv and output are its products. scan: a recurrence with attention's input, without norms.
    With a latent, qkv makes only that. dense_mlp: an MLP next to the experts. embedding: this layer's own. scalar: [1],
    the factor of the layer's output."""

    qkv: Linear
    output: Linear
    gate_up: Linear | None
    down: Linear | None
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    qk_norms: QKNorms | None
    sinks: Tensor | None
    head_gate: Linear | None = None
    delta: DeltaWeights | None = None
    taps: Tensor | None = None
    experts: PackedExperts | None = None
    scan: PackedLayer | None = None
    mla: PackedMLA | None = None
    dense_mlp: PackedDenseMLP | None = None
    embedding: PackedGate | None = None
    scalar: Tensor | None = None

    @property
    def feed_forward(self) -> tuple[Linear, Linear]:
        """The products into and out of a layer's MLP or experts, if it has any."""
        return self.gate_up or self.qkv, self.down or self.output

    @classmethod
    def pack(
        cls,
        layer: Layer,
        weights: LayerWeights,
        dtype: torch.dtype,
        rounds: bool = False,
        spills: torch.device | None = None,
    ) -> PackedLayer:
        """dtype: of activations. rounds, spills: see :class:`~foresay.verifier.model.linear.Linear`."""
        alone = layer.mixer if isinstance(layer.mixer, MLP | Experts) else None
        into, gates = (QKV, HEAD_GATE) if isinstance(layer.mixer, Attention) else (MIXED, RATES)
        into, out = (into, OUTPUT) if alone is None else (GATE_UP, DOWN)
        latent = None
        if isinstance(layer.mixer, MLA):
            latent, weights = PackedMLA.pack(layer.mixer, weights, dtype, rounds)
        elif isinstance(layer.mixer, Attention):
            weights = _turnable(layer.mixer, _gates_apart(layer.mixer, weights))
        elif isinstance(layer.mixer, GatedDelta) and layer.mixer.tiled:
            weights = _side_by_side(layer.mixer, weights)
        elif isinstance(layer.mixer, GatedDelta) and layer.mixer.by_key:
            weights = _kinds_apart(layer.mixer, weights)
        elif isinstance(layer.mixer, Mamba2):
            weights = _rates_apart(layer.mixer, weights)

        def linear(name: str, gated: Gate = "", experts: int = 0) -> Linear:
            return Linear(weights.matrices[name], weights.biases.get(name), dtype, gated, rounds, experts, spills)

        def around(name: str | None, factor: float = 1.0) -> Norm | None:
            return None if name is None else norm_of(layer.kind_of(name), name, weights.vectors, ones, factor)

        inner, ffn = layer.experts or layer.mlp, layer.feed_forward
        mixture = ffn if isinstance(ffn, Experts) else None
        count, own = (0, None) if mixture is None else (mixture.count, mixture.shared)
        shared = None if own is None else (linear(SHARED_GATE_UP, own.activation), linear(SHARED_DOWN))
        ones = torch.ones(weights.matrices[out].shape[0], dtype=dtype, device=spills or weights.matrices[out].device)
        return cls(
            linear(into, "" if alone is None else alone.activation, 0 if alone is None else count),
            linear(out, experts=0 if alone is None else count),
            None if inner is None else linear(GATE_UP, inner.activation, count),
            None if inner is None else linear(DOWN, experts=count),
            around(layer.norms.before_attention, layer.input_scales[0]),
            around(layer.norms.after_attention),
            around(layer.norms.before_mlp, layer.input_scales[1]),
            around(layer.norms.after_mlp),
            _norms_of_heads(layer.mixer, weights.vectors, ones) if isinstance(layer.mixer, Attention) else None,
            weights.vectors.get(SINKS),
            linear(gates) if gates in weights.matrices else None,
            _delta(layer.mixer, weights.vectors),
            _taps(weights.vectors[SHORT_TAPS]) if isinstance(layer.mixer, ShortConv) else None,
            None if mixture is None else PackedExperts.pack(mixture, weights.vectors, shared, dtype, layer.norm.eps),
            None if layer.scan is None else cls.pack(*_recurrence(layer.scan[0], layer, weights), dtype, rounds),
            latent,
            None if layer.experts is None else PackedDenseMLP.pack(layer, linear, around),
            None if layer.embedding is None else PackedGate.of(layer.embedding, linear, weights.vectors),
            weights.vectors.get(SCALAR),
        )


def _recurrence(node: Mamba2, layer: Layer, weights: LayerWeights) -> tuple[Layer, LayerWeights]:
    """A recurrence that has the input of attention, as a layer of its own."""
    own = {name.removeprefix(RECURRENT): each for name, each in weights.matrices.items() if name.startswith(RECURRENT)}
    return Layer(node, None, layer.norm, Norms()), LayerWeights(own, {}, weights.vectors)


def _taps(stored: Tensor) -> Tensor:
    """[T, C] of [C, 1, T]."""
    return stored.flatten(1).t().contiguous()


def _delta(node: Mixer, vectors: Mapping[str, Tensor]) -> DeltaWeights | None:
    """The other weights of a gated delta rule or a Mamba-2 scan, besides its products."""
    match node:
        case GatedDelta():
            taps, norm = _taps(vectors[TAPS]), vectors[f"{HEAD_NORM}.weight"]
            return DeltaWeights(taps, vectors[DECAY], vectors[SHIFT], norm, node.norm.eps, node.tiled)
        case Mamba2():
            own = {name.removeprefix(f"{SCAN}."): vector for name, vector in vectors.items()}
            order = _order(node, own["D"].device)[: node.channels]
            taps = _taps(own["conv1d.weight"][order])
            for part, factor in zip(taps.split((node.keys, node.keys, node.values), dim=1), node.factors, strict=False):
                part.mul_(factor)
            bias = own["conv1d.bias"][order] if node.biased else taps.new_zeros(node.channels)
            norm = own.get("norm.weight", taps.new_full((node.values,), math.sqrt(node.norm.eps)))
            scan = Scan(bias, own["D"], node.key_heads, node.factors[3])
            return DeltaWeights(taps, own["A_log"], own["dt_bias"], norm, node.norm.eps, scan=scan)
    return None


def _order(node: Mamba2, device: torch.device) -> Tensor:
    """int64[C + V]: the index in files (values, keys, queries, gates) of each of queries, keys, values, gates."""
    values, keys = node.values, node.keys
    parts = torch.arange(node.channels + values, device=device).split((values, keys, keys, values))
    return torch.cat([parts[at] for at in (2, 1, 0, 3)])


def _rates_apart(node: Mamba2, weights: LayerWeights) -> LayerWeights:
    """The same, with the product of steps separate, and the rest in the order of all recurrences."""
    whole = weights.matrices[MIXED]
    order = (_order(node, whole.device) + node.values) % (node.channels + node.values)  # gates come first
    steps = torch.arange(len(order), len(order) + node.value_heads, device=order.device)
    return replace(weights, matrices=weights.matrices | {MIXED: whole[order], RATES: whole[steps]})


def _side_by_side(node: GatedDelta, weights: LayerWeights) -> LayerWeights:
    """The same, with value heads of the same key adjacent, except in the product that reads their output."""
    whole = torch.arange(node.values, device=weights.vectors[DECAY].device)
    heads = whole[: node.value_heads].view(-1, node.key_heads).t().flatten()
    wide = whole.view(-1, node.key_heads, node.value_dim).transpose(0, 1).flatten()
    channels = torch.cat((torch.arange(2 * node.keys).to(wide), 2 * node.keys + wide))
    rows = {MIXED: torch.cat((channels, len(channels) + wide)), RATES: torch.cat((heads, len(heads) + heads))}
    numbers = {TAPS: channels, DECAY: heads, SHIFT: heads}
    matrices = {name: weights.matrices[name][order] for name, order in rows.items()}
    vectors = {name: weights.vectors[name][order] for name, order in numbers.items()}
    return replace(weights, matrices=weights.matrices | matrices, vectors=weights.vectors | vectors)


def _kinds_apart(node: GatedDelta, weights: LayerWeights) -> LayerWeights:
    """The same, with all queries first, then all keys, values, gates; and the learning rates before the decays."""
    own = node.value_heads // node.key_heads
    kinds = {MIXED: (node.key_dim, node.key_dim, own * node.value_dim, own * node.value_dim), RATES: (own, own)}
    matrices = dict(weights.matrices)
    for name in node.by_key:
        whole = torch.arange(matrices[name].shape[0]).view(node.key_heads, -1)
        order = torch.cat([part.flatten() for part in whole.split_with_sizes(kinds[name], dim=1)])
        matrices[name] = matrices[name][order.to(weights.vectors[DECAY].device)]
    return replace(weights, matrices=matrices)


def _gates_apart(attention: Attention, weights: LayerWeights) -> LayerWeights:
    """The same, with the rows of gates as a separate product if they are interleaved with each head's queries."""
    if not attention.interleaved:
        return weights
    assert attention.parts == 3, "keys and values follow"
    whole, rows = weights.matrices[QKV], torch.arange(weights.matrices[QKV].shape[0])
    queries, others = rows.split((len(rows) - 2 * (keys := attention.kv_heads * attention.head_dim), 2 * keys))
    own, gates = queries.view(attention.heads, 2, -1).unbind(1)
    into = {QKV: torch.cat((own.flatten(), others)), HEAD_GATE: gates.flatten()}
    matrices = {name: whole[each.to(whole.device)] for name, each in into.items()}
    return replace(weights, matrices=weights.matrices | matrices)


def norm_of(kind: NormKind, module: str, vectors: Mapping[str, Tensor], ones: Tensor, factor: float = 1.0) -> Norm:
    """The norm of that module. ones: the weight of a norm without one. factor: of its output."""
    weight = vectors.get(f"{module}.weight", ones)
    weight = weight if factor == 1.0 else weight * factor
    return Norm(weight, kind.eps, vectors.get(f"{module}.bias"), kind.centred)


def _norms_of_heads(attention: Attention, vectors: Mapping[str, Tensor], ones: Tensor) -> QKNorms | None:
    if attention.norm is None:
        return None
    whole, kind, after = attention.norm.whole, attention.norm.kind, attention.norm.after
    query, key = (
        vectors.get(f"{name}.weight", ones.new_ones(heads * attention.head_dim if whole else attention.head_dim))
        for name, heads in zip(attention.norm.names, (attention.heads, attention.kv_heads), strict=True)
    )
    key = query if attention.parts == 1 else key  # not read
    return QKNorms(query, key, kind.eps, whole, after, attention.value_norm is not None)


def _turnable(attention: Attention, weights: LayerWeights) -> LayerWeights:
    """The same, with the numbers of queries and keys reordered so that every head is rotated as a whole, in halves:
    their products are unchanged."""
    order = None if attention.rope is None else half_split_order(attention.rope, attention.head_dim)
    if order is None:
        return weights
    assert not attention.values_from_keys, "values have another order"
    turning = attention.heads + (attention.kv_heads if attention.parts > 1 else 0)
    first = (torch.arange(turning)[:, None] * attention.head_dim + order).flatten()
    others = attention.kv_heads * attention.head_dim if attention.parts > 2 else 0
    rows = torch.cat((first, len(first) + torch.arange(others)))
    whole = weights.matrices[QKV]
    matrices = {**weights.matrices, QKV: whole[rows.to(whole.device)]}
    biases = {name: bias[rows.to(bias.device)] if name == QKV else bias for name, bias in weights.biases.items()}
    return LayerWeights(matrices, biases, {**weights.vectors, **_turned_norms(attention, weights.vectors, order)})


def _turned_norms(attention: Attention, vectors: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """The norms of heads, in the same order."""
    names = () if attention.norm is None else (f"{name}.weight" for name in attention.norm.names)
    found = {name: vectors[name] for name in names if name in vectors}
    return {name: each.view(-1, len(order))[:, order.to(each.device)].flatten() for name, each in found.items()}


@dataclass(slots=True)
class Packed:
    """All weights of a decoder, packed for the kernels. embed: (V, H), scaled if the model does that. inputs: the
    common part of embeddings that layers have of their own; table: of these, as it is read."""

    embed: Tensor
    layers: list[PackedLayer]
    final_norm: Norm | None
    head: Linear
    embedding_norm: Norm | None = None
    inputs: PackedInputs | None = None
    table: Tensor | None = None

    @classmethod
    def pack(cls, config: ModelConfig, weights: ModelWeights, rounds: bool = False, spills: bool = False) -> Packed:
        """Pack them one by one, so that there is never a second copy of the model. rounds: see
        :class:`~foresay.verifier.model.linear.Linear`. spills: whether experts of some layers are on the CPU."""
        here = weights.embed.device if spills else None
        embed, dtype, layers = weights.embed, weights.embed.dtype, list[PackedLayer]()
        for index, layer in enumerate(config.stack.layers):
            layers.append(PackedLayer.pack(layer, weights.layers[index], dtype, rounds, here))
            weights.layers[index] = None  # type: ignore[call-overload]
        head = Linear(weights.lm_head, dtype=dtype, rounds=rounds)
        if config.stack.embedding_scale != 1.0:  # the head, made from the same matrix, is not scaled
            embed = embed * torch.tensor(config.stack.embedding_scale).to(embed)
        ones, first = embed.new_ones(embed.shape[1]), config.stack.embedding_norm
        final = norm_of(config.stack.norm, FINAL_NORM, weights.final_norm, ones)
        own, inputs = config.stack.embedding, weights.outside
        made = None
        if own is not None:
            projection = Linear(inputs.matrices[PROJECTION], dtype=dtype, rounds=rounds)
            made = PackedInputs.of(own, projection, inputs.vectors)
        of_embedding = None if first is None else norm_of(first, "", {}, ones)
        return cls(embed, layers, final, head, of_embedding, made, weights.table)


def _turn(node: Attention) -> tuple[RopeConfig | None, int, QueryScaling | None]:
    """What a layer's rotary table depends on."""
    return node.rope, node.rotary_dim, node.query_scaling


class Decoder:
    """A decoder-only model. Owns its weights, and runs on their device. rounds: how weights that are not packed yet are
    packed.

    embedding: [V, H], of the input, scaled if the model does that; heads share it. head: the output head, H to V; it
    multiplies the state after the final norm. table: of embeddings that layers have of their own, if they do.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights | Packed, max_positions: int, rounds: bool = False
    ) -> None:
        packed = weights if isinstance(weights, Packed) else Packed.pack(config, weights, rounds)
        self.config = config
        self.max_positions = max_positions
        self.embedding, self.head, self.layers = packed.embed, packed.head, packed.layers
        self.embedding_norm, self.final_norm = packed.embedding_norm, packed.final_norm
        self._inputs, self.table = packed.inputs, packed.table
        self.ropes = {
            kind: RopeTable(rope, width, max_positions, self.device, self.dtype, scaling)
            for kind in map(_turn, config.stack.attentions)
            for rope, width, scaling in (kind,)
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of weights and activations."""
        return self.embedding.device

    def rotations(self, positions: Tensor, count: Tensor | None) -> list[Rotation]:
        """For each attention layer: the cosines and sines of rows at these positions, see :meth:`RopeTable.rows`."""
        found = {kind: table.rows(positions, count) for kind, table in self.ropes.items()}
        return [found[_turn(one)] for one in self.config.stack.attentions]

    def inputs(self, x: Tensor, tokens: Tensor, count: Tensor | None) -> Tensor | None:
        """[R, L * P]: what layers read of the rows' tokens, and of their embeddings x; None where layers do not."""
        return None if self._inputs is None or self.table is None else self._inputs(self.table, x, tokens, count)

    @property
    def linears(self) -> list[Linear]:
        """Every matrix of the model except routers, the output head last."""
        every = (each for layer in self.layers for each in (layer.scan, layer) if each is not None)
        inside = ((layer.qkv, layer.head_gate, layer.output, layer.gate_up, layer.down) for layer in every)
        shared = (one for layer in self.layers if layer.experts is not None for one in layer.experts.shared or ())
        latent = (one for layer in self.layers if layer.mla is not None for one in layer.mla.linears)
        beside = (one for layer in self.layers if layer.dense_mlp is not None for one in layer.dense_mlp.products)
        own = (one for each in self.layers if (end := each.embedding) is not None for one in (end.gate, end.back))
        first = () if self._inputs is None else (self._inputs.projection,)
        alone = (one for products in inside for one in products if one is not None)
        return [*first, *alone, *shared, *latent, *beside, *own, self.head]
