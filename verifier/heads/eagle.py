"""EAGLE heads: one decoder layer that guesses on from the target's own hidden state.

::

    f(t-1)  features of position t - 1 ── fuse ── h        x(t)  the token at t ── embedding ── e
    EAGLE-3   a = [norm e; norm h],  s = h + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U norm(y)
    EAGLE-1   a = fc [e; h],         s = a + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U y

Row t stands in slot t of the head's own store and is made of (feature t - 1, token t), so a page depends on its own
text alone; slot 0 holds nothing. Where there is no feature yet (drafted tokens), the row before's own y stands in.
Legend: R rows, H hidden width, F width of all features, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvpaging import KVStore
from kvpaging.ops import store_rows
from spec.features import Features
from verifier.batch import ForwardBatch
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.model.linear import Linear
from verifier.model.rope import RopeTable
from verifier.ops.activation import silu_mul
from verifier.ops.attention import attend
from verifier.ops.norm import rms_norm
from verifier.ops.rope import rotate


class EagleHead:
    """One head over paged KV. Owns its weights, but for what it shares with the target; the store is the caller's."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, max_positions: int) -> None:
        self.config = config
        self.layer = config.layer
        self.group = self.layer.num_heads // self.layer.num_kv_heads
        self.token_ids = weights.token_ids
        self._embed = weights.embed
        self._norms = weights.norms
        self._fc = None if weights.fc is None else Linear(weights.fc, weights.fc_bias)
        self._qkv = Linear(weights.qkv, weights.qkv_bias)
        self._output = Linear(weights.o, weights.o_bias)
        self._gate_up, self._down = Linear(weights.gate_up), Linear(weights.down)
        self._head = weights.head
        self._rope = RopeTable(self.layer, max_positions)
        self._scale = self.layer.head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self._embed.dtype

    @torch.inference_mode()
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: what the head reads of each position, of the target's features, each [R, H']."""
        parts = [features[name] for name in self.config.names]
        if self.config.fc_normed:
            parts = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
        fused = torch.cat(parts, dim=-1)
        if self.config.fc_input_normed:
            fused = self._norm("input_norm", fused)
        return fused if self.config.generation == 1 or self._fc is None else self._fc(fused)

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Run the rows, storing their KV; hidden: [R, H], the fused feature (or the state) behind each row's token.

        Returns fp32[W, V'] logits of the wanted rows and the states to go on from, [W, H].
        """
        hidden = functional.pad(hidden, (0, 0, 0, len(batch.tokens) - len(hidden)))
        mixed, residual = self._inputs(functional.embedding(batch.tokens, self._embed), hidden)
        query = self._stored(mixed, batch, store)
        if not len(batch.wanted):
            return hidden.new_empty(0, self._head.out_features, dtype=torch.float32), hidden[:0]
        x = (residual + self._attention(query, batch, store))[batch.wanted]
        x = x + self._down(silu_mul(self._gate_up(self._norm("post_attention_layernorm", x))))
        if self.config.generation == 1:
            return self._head(x).float(), x
        normed = self._norm("norm", x)
        return self._head(normed).float(), normed if self.config.output_normed else x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._norms[name], self.layer.rms_norm_eps)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and what its result is added to."""
        if self.config.generation == 1:
            assert self._fc is not None
            mixed = self._fc(torch.cat((embedded, hidden), dim=-1))
            return mixed, mixed
        normed = self._norm("hidden_norm", hidden)
        mixed = torch.cat((self._norm("input_layernorm", embedded), normed), dim=-1)
        return mixed, normed if self.config.residual_normed else hidden

    def _stored(self, mixed: Tensor, batch: ForwardBatch, store: KVStore) -> Tensor:
        """Rotated queries [R, Hq, D]; the rows' keys and values are stored on the way."""
        c = self.layer
        heads = self._qkv(mixed).view(len(mixed), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        cos, sin = self._rope.rows(batch.positions, mixed.dtype)
        turned = rotate(self._turning(heads[:, : -c.num_kv_heads]), cos, sin)
        key, value = turned[: batch.live, c.num_heads :], heads[: batch.live, -c.num_kv_heads :]
        store_rows(store.keys[0], store.values[0], batch.slots, key, value)
        return turned[:, : c.num_heads]

    def _attention(self, query: Tensor, batch: ForwardBatch, store: KVStore) -> Tensor:
        """[R, H]. Slot 0 is not seen."""
        keys, values = store.keys[0], store.values[0]
        for segment in batch.segments:
            segment.first = 1
        seen = [attend(query[s.rows], keys, values, s, self._scale, False) for s in batch.segments]
        padding = seen[0].new_zeros(len(query) - batch.live, seen[0].shape[1])
        return self._output(torch.cat([*seen, padding]).to(query.dtype))

    def _turning(self, heads: Tensor) -> Tensor:
        """Queries and keys, normed by head where the head has such norms."""
        if "q_norm" not in self._norms:
            return heads
        query, key = heads.split_with_sizes((self.layer.num_heads, self.layer.num_kv_heads), dim=1)
        return torch.cat((self._norm("q_norm", query), self._norm("k_norm", key)), dim=1)
