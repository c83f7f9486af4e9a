"""One lean decoder for targets and draft models of all families (:mod:`foresay.verifier.model.families`).

The forward pass is :func:`foresay.verifier.model.paged_pass.paged_pass`. Legend: H hidden width, Q query heads, G kv
heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.config import BEFORE_MLP, ModelConfig
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.rope import RopeTable, pairs_apart
from foresay.verifier.model.sizes import DOWN, GATE_UP, OUTPUT, QKV
from foresay.verifier.model.weights import LayerWeights, ModelWeights


@dataclass(slots=True)
class Layer:
    """The weights of one layer, packed. window: how far its queries see; None: to the beginning. turned: whether they
    and the keys are rotated by their positions."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    norms: dict[str, Tensor]
    window: int | None
    turned: bool

    @classmethod
    def of(cls, config: ModelConfig, number: int, weights: LayerWeights, rounds: bool = False) -> Layer:
        """Layer ``number``."""
        dtype = weights.norms[BEFORE_MLP].dtype
        if config.rotated < config.head_dim:
            weights = _pairs_apart(config, weights)

        def linear(name: str, then: Linear | None = None) -> Linear:
            bias = weights.biases.get(name)
            return Linear(weights.matrices[name], bias, dtype, gated=name == GATE_UP, then=then, rounds=rounds)

        gate_up = linear(GATE_UP)
        window = config.sliding_window if config.sliding_layers[number] else None
        kept = linear(QKV), linear(OUTPUT, gate_up), gate_up, linear(DOWN)
        return cls(*kept, weights.norms, window, config.turned_layers[number])

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and of keys, [D] each."""
        return self.norms.get("self_attn.q_norm"), self.norms.get("self_attn.k_norm")


def _pairs_apart(config: ModelConfig, weights: LayerWeights) -> LayerWeights:
    """The same, heads of queries and keys in an order in which they are rotated as a whole: their products stay."""
    order = pairs_apart(config.head_dim, config.rotated)
    turning = config.num_heads + config.num_kv_heads
    first = (torch.arange(turning)[:, None] * config.head_dim + order).flatten()
    rows = torch.cat((first, len(first) + torch.arange(config.num_kv_heads * config.head_dim)))
    moved = {name: weight[rows.to(weight.device)] for name, weight in ((QKV, weights.matrices[QKV]),)}
    biases = {name: bias[rows.to(bias.device)] for name, bias in weights.biases.items() if name == QKV}
    heads = {name: norm[order.to(norm.device)] for name, norm in weights.norms.items() if name.startswith("self_attn.")}
    return LayerWeights({**weights.matrices, **moved}, {**weights.biases, **biases}, {**weights.norms, **heads})


class Decoder:
    """A decoder-only model. Owns its weights, and is run where they are. rounds: see
    :class:`~foresay.verifier.model.linear.Linear`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_positions: int, rounds: bool = False) -> None:
        self.config = config
        self.max_positions = max_positions
        self.group = config.num_heads // config.num_kv_heads
        self._embed = weights.embed
        self.scale = config.head_dim**-0.5
        self.all_turned = all(config.turned_layers)
        self.rope = RopeTable(config, max_positions, self.device, self.dtype)
        self.layers: list[Layer] = []
        for index in range(len(weights.layers)):  # packed one by one, so that no second copy of the model stands
            self.layers.append(Layer.of(config, index, weights.layers[index], rounds))
            weights.layers[index] = None  # type: ignore[call-overload]
        self.final_norm = weights.final_norm
        self._head = Linear(weights.lm_head, dtype=self.dtype, rounds=rounds)

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
        """[V, H]: the input embedding, which heads share."""
        return self._embed

    @property
    def head(self) -> Linear:
        """The output head, H to V; it multiplies the state behind the final norm."""
        return self._head

    @property
    def linears(self) -> list[Linear]:
        """Every matrix of the model, the output head last."""
        inside = [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*inside, self._head]
