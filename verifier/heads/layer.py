"""What heads over paged KV are made of: an embedding, and the decoder's layer with whatever biases and norms it has."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.model.config import AFTER_ATTENTION, ModelConfig
from foresay.verifier.model.decoder import Layer
from foresay.verifier.model.paged_pass import attended
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.norm import add_rms_norm
from foresay.verifier.ops.rope import Rotation, rotate_and_store
from foresay.verifier.paged_rows import StaticRows


class HeadLayer:
    """Layer number ``number`` of a head. first: positions below hold nothing and are not seen.

    norms: the weights of its norms, by name.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, number: int, first: int) -> None:
        self._layer, self._eps = (
            Layer.of(config, number, weights, weights.norms[AFTER_ATTENTION].dtype),
            config.rms_norm_eps,
        )
        self._number, self._first, self.norms = number, first, weights.norms
        self._scale = config.head_dim**-0.5

    def seen(self, mixed: Tensor, rows: StaticRows, rotation: Rotation, store: KVStore) -> Tensor:
        """[R, Hq D]: what static rows read of those before them; their own keys and values are stored before."""
        query = self.placed(mixed, rows.slots, rotation, store)
        return attended(query, store.layer(self._number), rows, self._scale, self._layer.window, self._first)

    def placed(self, mixed: Tensor, slots: Tensor, rotation: Rotation, store: KVStore) -> Tensor:
        """[R, Hq, D]: the queries of rows whose keys and values are stored."""
        qkv, norms = self._layer.qkv.unfinished(mixed), self._layer.of_heads(self._eps)
        return rotate_and_store(qkv, rotation, store.layer(self._number), slots, norms)

    def finish(self, x: Tensor, seen: Tensor, norm: Tensor | None) -> Tensor:
        """The rest of the layer is added to x, [R, H], in place. Returns x, normed with ``norm`` if there is one."""
        layer = self._layer
        normed = add_rms_norm(x, layer.output.unfinished(seen), layer.before_mlp, self._eps)
        gated = layer.gate_up.gated(normed)
        return (
            x.add_(layer.down(gated))
            if norm is None
            else add_rms_norm(x, layer.down.unfinished(gated), norm, self._eps)
        )


class PagedHead:
    """What heads over paged KV have in common: the tokens that they read are rows of ``_embed``, [V, H]."""

    _embed: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self._embed.dtype

    @property
    def vocab_size(self) -> int:
        """How many tokens it can read: the target's."""
        return len(self._embed)

    @property
    def device(self) -> torch.device:
        """Where weights and activations are."""
        return self._embed.device
