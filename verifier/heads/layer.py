"""One decoder layer of a head, over paged KV: the Llama layer, with whatever biases and norms its file has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging import KVStore
from kvpaging.ops import store_rows
from verifier.batch import ForwardBatch
from verifier.model.config import ModelConfig
from verifier.model.linear import Linear
from verifier.ops.attention import attend
from verifier.ops.norm import add_rms_norm, rms_norm
from verifier.ops.rope import rotate, rotate_and_store
from verifier.ops.tree_attention import tree_attention
from verifier.paged_rows import StaticRows


@dataclass(slots=True)
class LayerWeights:
    """The weights of one layer, in the target's dtype.

    qkv: [(Hq + 2 Hk) D, N], N the width that its attention reads. o: [H, Hq D]. gate_up: [2 I, H]. down: [H, I].
    norms: by name, ``q_norm`` and ``k_norm`` among them where queries and keys are normed by head.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    norms: dict[str, Tensor]


class HeadLayer:
    """Layer number ``number`` of a head. Slot 0 of a sequence holds nothing and is not seen.

    norms: the weights of its norms, by name.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, number: int) -> None:
        self._config, self._number, self.norms = config, number, weights.norms
        self._qkv = Linear(weights.qkv, weights.qkv_bias)
        self._output = Linear(weights.o, weights.o_bias)
        self._gate_up, self._down = Linear(weights.gate_up), Linear(weights.down)
        self._scale = config.head_dim**-0.5

    def fitting(self, rows: int) -> int:
        """How many rows to run where so many are needed: what products take without padding them each by itself."""
        return self._qkv.fitting(rows)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm with the layer's weight of that name."""
        return rms_norm(x, self.norms[name], self._config.rms_norm_eps)

    def stored(self, mixed: Tensor, batch: ForwardBatch, rotation: tuple[Tensor, Tensor], store: KVStore) -> Tensor:
        """Rotated queries [R, Hq, D]; the rows' keys and values are stored on the way."""
        c = self._config
        heads = self._qkv(mixed).view(len(mixed), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        turned = rotate(self._turning(heads[:, : -c.num_kv_heads]), *rotation)
        key, value = turned[: batch.live, c.num_heads :], heads[: batch.live, -c.num_kv_heads :]
        store_rows(store.keys[self._number], store.values[self._number], batch.slots, key, value)
        return turned[:, : c.num_heads]

    def attention(self, query: Tensor, batch: ForwardBatch, store: KVStore) -> Tensor:
        """[R, H]: what the rows read of those before them."""
        keys, values = store.keys[self._number], store.values[self._number]
        seen = [attend(query[s.rows], keys, values, s, self._scale, False) for s in batch.segments]
        padding = seen[0].new_zeros(len(query) - batch.live, seen[0].shape[1])
        return self._output(torch.cat([*seen, padding]).to(query.dtype))

    def mlp(self, x: Tensor) -> Tensor:
        """[R, H]: what the second half of the layer adds."""
        return self._down(self._gate_up.gated(self.norm("post_attention_layernorm", x)))

    def seen(self, mixed: Tensor, rows: StaticRows, rotation: tuple[Tensor, Tensor], store: KVStore) -> Tensor:
        """[R, Hq D]: what static rows read of those before them; their own keys and values are stored before."""
        keys, values = store.keys[self._number], store.values[self._number]
        norms, eps = self.norms, self._config.rms_norm_eps
        query = rotate_and_store(
            self._qkv(mixed), *rotation, keys, values, rows.slots, norms.get("q_norm"), norms.get("k_norm"), eps
        ).contiguous()
        parts = [tree_attention(query[g.rows], keys, values, g.paged, self._scale, first=1) for g in rows.groups]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def finish(self, x: Tensor, seen: Tensor, norm: Tensor | None) -> Tensor:
        """The rest of the layer is added to x, [R, H], in place. Returns x, normed with ``norm`` if there is one."""
        eps = self._config.rms_norm_eps
        normed = add_rms_norm(x, self._output(seen), self.norms["post_attention_layernorm"], eps)
        added = self._down(self._gate_up.gated(normed))
        return x.add_(added) if norm is None else add_rms_norm(x, added, norm, eps)

    def _turning(self, heads: Tensor) -> Tensor:
        """Queries and keys, normed by head where the layer has such norms."""
        if "q_norm" not in self.norms:
            return heads
        c = self._config
        query, key = heads.split_with_sizes((c.num_heads, c.num_kv_heads), dim=1)
        return torch.cat((self.norm("q_norm", query), self.norm("k_norm", key)), dim=1)
