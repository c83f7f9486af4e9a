"""One lean decoder for targets and draft models: Llama, SmolLM, Mistral, Qwen2/2.5, Qwen3.

The forward pass is :func:`foresay.verifier.model.paged_pass.paged_pass`. Legend: H hidden width, Q query heads, G kv
heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.rope import RopeTable
from foresay.verifier.model.weights import LayerWeights, ModelWeights


@dataclass(slots=True)
class Layer:
    """The weights of one layer, packed. windowed: whether a sliding window hides what is far behind."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    windowed: bool

    @classmethod
    def of(cls, weights: LayerWeights, windowed: bool, rounds: bool) -> Layer:
        dtype = weights.input_norm.dtype
        gate_up = Linear(weights.gate_up, weights.gate_up_bias, dtype, gated=True, rounds=rounds)
        return cls(
            qkv=Linear(weights.qkv, weights.qkv_bias, dtype, rounds=rounds),
            output=Linear(weights.o, weights.o_bias, dtype, then=gate_up, rounds=rounds),
            gate_up=gate_up,
            down=Linear(weights.down, weights.down_bias, dtype, rounds=rounds),
            input_norm=weights.input_norm,
            post_norm=weights.post_norm,
            query_norm=weights.q_norm,
            key_norm=weights.k_norm,
            windowed=windowed,
        )


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
        layers = []
        for index in range(len(weights.layers)):
            layers.append(Layer.of(weights.layers[index], config.sliding_layers[index], rounds))
            weights.layers[index] = None  # type: ignore[call-overload]
        head = Linear(weights.lm_head, dtype=weights.embed.dtype, rounds=rounds)
        return cls(weights.embed, layers, weights.final_norm, head)


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
        self.window = config.sliding_window if any(config.sliding_layers) else None
        self._embed, self.layers, self.final_norm, self._head = (
            packed.embed, packed.layers, packed.final_norm, packed.head,
        )  # fmt: skip
        self.scale = config.head_dim**-0.5
        self.rope = RopeTable(config, max_positions, self.device, self.dtype)

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
