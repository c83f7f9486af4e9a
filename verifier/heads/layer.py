"""What heads over paged KV are made of: an embedding, and the decoder's layer with whatever biases and norms it has."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.model.decoder import PackedLayer
from foresay.verifier.model.nodes import Layer
from foresay.verifier.model.paged_pass import attended, placed
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.norm import add_norm
from foresay.verifier.ops.records import Norm, Rotation
from foresay.verifier.paged_rows import StaticRows


class HeadLayer:
    """Layer number ``number`` of a head. first: positions below hold nothing and are not seen."""

    def __init__(self, layer: Layer, weights: LayerWeights, dtype: torch.dtype, number: int, first: int) -> None:
        self._node, self._packed = layer, PackedLayer.of(layer, weights, dtype)
        self._number, self._first = number, first

    @property
    def before(self) -> Norm | None:
        """The norm of what attention reads."""
        return self._packed.before_attention

    def seen(self, mixed: Tensor, rows: StaticRows, rotation: Rotation, store: KVStore) -> Tensor:
        """[R, Hq D]: what static rows read of those before them; their own keys and values are stored before."""
        query = self.placed(mixed, rows.slots, rotation, store)
        return attended(query, store.layer(self._number), rows, self._node.attention, None, self._first)

    def placed(self, mixed: Tensor, slots: Tensor, rotation: Rotation, store: KVStore) -> Tensor:
        """[R, Hq, D]: the queries of rows whose keys and values are stored."""
        return placed(self._packed, mixed, rotation, slots, store.layer(self._number))

    def finish(self, x: Tensor, seen: Tensor, norm: Norm | None) -> Tensor:
        """The rest of the layer is added to x, [R, H], in place. Returns x, normed with ``norm`` if there is one."""
        layer = self._packed
        normed = add_norm(x, layer.output.unfinished(seen), layer.before_mlp)
        return add_norm(x, layer.down.unfinished(layer.gate_up.gated(normed)), norm)


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
