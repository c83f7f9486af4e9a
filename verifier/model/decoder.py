"""One lean decoder for targets and draft models of all families (:mod:`foresay.verifier.model.families`).

The forward pass is :func:`foresay.verifier.model.paged_pass.paged_pass`. Legend: H hidden width, Q query heads, G kv
heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.config import AFTER_ATTENTION, BEFORE_ATTENTION, SANDWICH, ModelConfig
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.rope import RopeTable, pairs_apart
from foresay.verifier.model.sizes import DOWN, GATE_UP, OUTPUT, QKV
from foresay.verifier.model.weights import LayerWeights, ModelWeights
from foresay.verifier.ops.linear import Gate
from foresay.verifier.ops.rope import HeadNorms, Rotation


@dataclass(slots=True)
class Layer:
    """The weights of one layer, packed. norms: all, by name; window: how far its queries see; None: to the beginning.
    table: by which of the model's rotary tables they and the keys are rotated; None: by none."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    norms: dict[str, Tensor]
    sandwich: bool
    window: int | None
    table: int | None

    @classmethod
    def of(
        cls, config: ModelConfig, number: int, weights: LayerWeights, dtype: torch.dtype, rounds: bool = False
    ) -> Layer:
        """Layer ``number``. dtype: of activations."""
        if config.rotated < config.head_dim:
            weights = _pairs_apart(config, weights)

        def linear(name: str, gated: Gate = "", then: Linear | None = None) -> Linear:
            return Linear(weights.matrices[name], weights.biases.get(name), dtype, gated, then, rounds)

        gate_up, slides = linear(GATE_UP, config.activation), config.sliding_layers[number]
        products = linear(QKV), linear(OUTPUT, then=gate_up), gate_up, linear(DOWN)
        table = int(slides and config.local_rope is not None) if config.turned_layers[number] else None
        window = config.sliding_window if slides else None
        return cls(*products, weights.norms, config.how.sandwich, window, table)

    @property
    def before_attention(self) -> Tensor:
        """[H]: the weight of the norm of what attention reads."""
        return self.norms[BEFORE_ATTENTION]

    @property
    def before_mlp(self) -> Tensor:
        """[H]: of what the MLP reads."""
        return self.norms[SANDWICH[0] if self.sandwich else AFTER_ATTENTION]

    @property
    def behind(self) -> tuple[Tensor, Tensor] | None:
        """[H] each: of what attention puts out, and the MLP; None where that is added as it is."""
        return (self.norms[AFTER_ATTENTION], self.norms[SANDWICH[1]]) if self.sandwich else None

    def of_heads(self, eps: float) -> HeadNorms | None:
        """Of queries and keys; None where the model has none."""
        query, key = self.norms.get("self_attn.q_norm"), self.norms.get("self_attn.k_norm")
        return None if query is None or key is None else HeadNorms(query, key, eps)


def _pairs_apart(config: ModelConfig, weights: LayerWeights) -> LayerWeights:
    """The same, heads of queries and keys in an order in which they are rotated as a whole: their products stay."""
    order = pairs_apart(config.head_dim, config.rotated)
    turning = config.num_heads + config.num_kv_heads
    first = (torch.arange(turning)[:, None] * config.head_dim + order).flatten()
    rows = torch.cat((first, len(first) + torch.arange(config.num_kv_heads * config.head_dim)))
    whole = weights.matrices[QKV]
    matrices = {**weights.matrices, QKV: whole[rows.to(whole.device)]}
    biases = {name: bias[rows.to(bias.device)] if name == QKV else bias for name, bias in weights.biases.items()}
    assert not config.qk_norm, "no family has norms of heads of which a part is rotated"
    return LayerWeights(matrices, biases, weights.norms)


@dataclass(slots=True)
class Packed:
    """All weights of a decoder, as they are multiplied by. embed: (V, H). final_norm: (H,)."""

    embed: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: Linear

    @classmethod
    def of(cls, config: ModelConfig, weights: ModelWeights, rounds: bool = False) -> Packed:
        """Pack them one by one, so that no second copy of the model stands. rounds: see
        :class:`~foresay.verifier.model.linear.Linear`."""
        embed, dtype, layers = weights.embed, weights.embed.dtype, list[Layer]()
        for index in range(len(weights.layers)):
            layers.append(Layer.of(config, index, weights.layers[index], dtype, rounds))
            weights.layers[index] = None  # type: ignore[call-overload]
        head = Linear(weights.lm_head, dtype=dtype, rounds=rounds)
        if config.embedding_scale != 1.0:  # which the head, made of the same matrix, is not
            embed = embed * torch.tensor(config.embedding_scale).to(embed)
        return cls(embed, layers, weights.final_norm, head)


class Decoder:
    """A decoder-only model. Owns its weights, and is run where they are. rounds: how weights are packed that are not
    yet."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights | Packed, max_positions: int, rounds: bool = False
    ) -> None:
        packed = weights if isinstance(weights, Packed) else Packed.of(config, weights, rounds)
        self.config = config
        self.max_positions = max_positions
        self.group = config.num_heads // config.num_kv_heads
        self._embed, self.layers, self.final_norm, self._head = (
            packed.embed, packed.layers, packed.final_norm, packed.head,
        )  # fmt: skip
        self.scale = config.scale
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.ropes = [RopeTable(config, max_positions, self.device, self.dtype, rope) for rope in ropes]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self._embed.dtype

    @property
    def device(self) -> torch.device:
        """Where weights and activations are."""
        return self._embed.device

    @property
    def embedding(self) -> Tensor:
        """[V, H]: the input embedding, scaled where the model does that. Heads share it."""
        return self._embed

    @property
    def rope(self) -> RopeTable:
        """The rotary table, of layers that see everything where others have one of their own."""
        return self.ropes[0]

    def rotations(self, positions: Tensor, count: Tensor | None) -> list[Rotation]:
        """By layer: the cosines and sines of rows at these positions, see :meth:`RopeTable.rows`."""
        tables = [rope.rows(positions, count) for rope in self.ropes]
        if any(layer.table is None for layer in self.layers):
            tables.append(self.rope.still(positions))
        return [tables[-1 if layer.table is None else layer.table] for layer in self.layers]

    @property
    def head(self) -> Linear:
        """The output head, H to V; it multiplies the state behind the final norm."""
        return self._head

    @property
    def linears(self) -> list[Linear]:
        """Every matrix of the model, the output head last."""
        inside = [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*inside, self._head]
