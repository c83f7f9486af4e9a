"""What heads over paged KV are made of: an embedding, and the Llama layer with whatever biases and norms it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.model.paged_pass import attended
from foresay.verifier.ops.norm import add_rms_norm
from foresay.verifier.ops.rope import rotate_and_store
from foresay.verifier.paged_rows import StaticRows


@dataclass(slots=True)
class LayerWeights:
    """The weights of one layer, in the target's dtype but for matrices of few bits.

    qkv: [(Hq + 2 Hk) D, N], N the width that its attention reads. o: [H, Hq D]. gate_up: [2 I, H]. down: [H, I].
    norms: by name, ``q_norm`` and ``k_norm`` among them where queries and keys are normed by head.
    """

    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    gate_up: Matrix
    down: Matrix
    norms: dict[str, Tensor]


class HeadLayer:
    """Layer number ``number`` of a head. first: positions below hold nothing and are not seen.

    norms: the weights of its norms, by name.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, number: int, first: int) -> None:
        self._config, self._number, self._first, self.norms = config, number, first, weights.norms
        self._window = config.sliding_window if config.sliding_layers[number] else None
        dtype = weights.norms["post_attention_layernorm"].dtype
        self._qkv = Linear(weights.qkv, weights.qkv_bias, dtype)
        self._gate_up, self._down = Linear(weights.gate_up, None, dtype, gated=True), Linear(weights.down, None, dtype)
        self._output = Linear(weights.o, weights.o_bias, dtype, then=self._gate_up)
        self._scale = config.head_dim**-0.5

    def seen(self, mixed: Tensor, rows: StaticRows, rotation: tuple[Tensor, Tensor], store: KVStore) -> Tensor:
        """[R, Hq D]: what static rows read of those before them; their own keys and values are stored before."""
        query = self.placed(mixed, rows.slots, rotation, store)
        return attended(query, store.layer(self._number), rows, self._scale, self._window, self._first)

    def placed(self, mixed: Tensor, slots: Tensor, rotation: tuple[Tensor, Tensor], store: KVStore) -> Tensor:
        """[R, Hq, D]: the queries of rows whose keys and values are stored."""
        keys, values, scales = store.layer(self._number)
        norms, eps = self.norms, self._config.rms_norm_eps
        return rotate_and_store(
            self._qkv.unfinished(mixed), *rotation, keys, values, slots,
            norms.get("q_norm"), norms.get("k_norm"), eps, scales=scales,
        )  # fmt: skip

    def finish(self, x: Tensor, seen: Tensor, norm: Tensor | None) -> Tensor:
        """The rest of the layer is added to x, [R, H], in place. Returns x, normed with ``norm`` if there is one."""
        eps = self._config.rms_norm_eps
        normed = add_rms_norm(x, self._output.unfinished(seen), self.norms["post_attention_layernorm"], eps)
        gated = self._gate_up.gated(normed)
        return x.add_(self._down(gated)) if norm is None else add_rms_norm(x, self._down.unfinished(gated), norm, eps)


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
