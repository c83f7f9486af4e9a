"""One lean decoder for targets and draft models: Llama, SmolLM, Mistral, Qwen2/2.5, Qwen3.

The forward pass is a function of a :class:`~verifier.batch.ForwardBatch` and of the KV store; it holds no state.
Legend: R rows, H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvpaging import KVStore
from kvpaging.ops import store_rows
from spec.protocols import FeatureRequest
from verifier.batch import ForwardBatch
from verifier.model.config import ModelConfig
from verifier.model.linear import Linear
from verifier.model.rope import RopeTable
from verifier.model.weights import LayerWeights, ModelWeights
from verifier.ops.attention import attend
from verifier.ops.norm import rms_norm
from verifier.ops.rope import rotate


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
    def of(cls, weights: LayerWeights, windowed: bool) -> Layer:
        dtype = weights.input_norm.dtype
        return cls(
            qkv=Linear(weights.qkv, weights.qkv_bias, dtype),
            output=Linear(weights.o, weights.o_bias, dtype),
            gate_up=Linear(weights.gate_up, weights.gate_up_bias, dtype),
            down=Linear(weights.down, weights.down_bias, dtype),
            input_norm=weights.input_norm,
            post_norm=weights.post_norm,
            query_norm=weights.q_norm,
            key_norm=weights.k_norm,
            windowed=windowed,
        )


class Decoder:
    """A decoder-only model over paged KV. Owns its weights and runs where they are; the KV store is the caller's."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_positions: int) -> None:
        self.config = config
        self.max_positions = max_positions
        self.group = config.num_heads // config.num_kv_heads
        self.window = config.sliding_window if any(config.sliding_layers) else None
        self._embed = weights.embed
        self.scale = config.head_dim**-0.5
        self.rope = RopeTable(config, max_positions, self.device, self.dtype)
        self.layers = []
        for index in range(len(weights.layers)):  # packed one by one, so that no second copy of the model stands
            self.layers.append(Layer.of(weights.layers[index], config.sliding_layers[index]))
            weights.layers[index] = None  # type: ignore[call-overload]
        self.final_norm = weights.final_norm
        self._head = Linear(weights.lm_head, dtype=self.dtype)

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

    def fitting(self, rows: int) -> int:
        """How many rows to run where so many are needed: what products take without padding them each by itself."""
        return self.layers[0].qkv.fitting(rows)

    @torch.inference_mode()
    def __call__(
        self, batch: ForwardBatch, store: KVStore, features: FeatureRequest | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the rows through the model, storing their KV.

        Returns fp32[W, V] logits of the wanted rows and the features asked for, each [R, H].
        """
        asked = features or FeatureRequest()
        x, taken = self._states(batch, store, asked)
        if batch.sift(x[: batch.live]):
            x, taken = self._states(batch, store, asked)
        if len(self.layers) in asked.layers:
            taken[f"layer.{len(self.layers)}"] = x[: batch.live]
        if asked.final:
            taken["final"] = rms_norm(x[: batch.live], self.final_norm, self.config.rms_norm_eps)
        return self._logits(x, batch.wanted), taken

    def _states(self, batch: ForwardBatch, store: KVStore, asked: FeatureRequest) -> tuple[Tensor, dict[str, Tensor]]:
        """[R, H]: the rows behind the last layer; and the inputs of the layers asked for."""
        x = functional.embedding(batch.tokens, self._embed)
        cos, sin = self.rope.rows(batch.positions, x.dtype)
        taken: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in asked.layers:
                taken[f"layer.{index}"] = x[: batch.live].clone()
            x = self._attention(index, layer, x, cos, sin, batch, store)
            inner = layer.gate_up.gated(rms_norm(x, layer.post_norm, self.config.rms_norm_eps))
            x = layer.down(inner, residual=x)
        return x, taken

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, store: KVStore
    ) -> Tensor:
        """x plus the attention of one layer, [R, H]; the rows' keys and values are stored on the way."""
        query, key, value = self._project(layer, rms_norm(x, layer.input_norm, self.config.rms_norm_eps), cos, sin)
        keys, values = store.keys[index], store.values[index]
        store_rows(keys, values, batch.slots, key[: batch.live], value[: batch.live])
        mixed = [attend(query[s.rows], keys, values, s, self.scale, layer.windowed) for s in batch.segments]
        if len(mixed) == 1 and batch.live == len(x):
            return layer.output(mixed[0].to(x.dtype), residual=x)
        padding = mixed[0].new_zeros(len(x) - batch.live, mixed[0].shape[1])
        return layer.output(torch.cat([*mixed, padding]).to(x.dtype), residual=x)

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [R, Q, D], rotated keys [R, G, D], values [R, G, D]."""
        c = self.config
        heads = layer.qkv(x).view(len(x), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        turning, value = heads[:, : -c.num_kv_heads], heads[:, -c.num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(turning[:, : c.num_heads], layer.query_norm, c.rms_norm_eps)
            key = rms_norm(turning[:, c.num_heads :], layer.key_norm, c.rms_norm_eps)
            turning = torch.cat((query, key), dim=1)
        turned = rotate(turning, cos, sin)
        return turned[:, : c.num_heads], turned[:, c.num_heads :], value

    def _logits(self, x: Tensor, wanted: Tensor) -> Tensor:
        """fp32[W, V]; a single row goes through the head in company."""
        if not len(wanted):
            return x.new_empty(0, self._head.out_features, dtype=torch.float32)
        rows = x if len(wanted) == len(x) else x[wanted if len(wanted) > 1 else wanted.expand(self._head.fitting(1))]
        logits = self._head(rms_norm(rows, self.final_norm, self.config.rms_norm_eps))
        return logits[: len(wanted)].float()
