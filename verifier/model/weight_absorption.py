"""The packed weights of latent attention (:mod:`foresay.verifier.model.mla`, whose letters are used here)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mla import HEAD_KEYS, HEAD_VALUES, LATENT_NORM, MLA, QUERIES, QUERY_DOWN, QUERY_NORM
from foresay.verifier.model.products import QKV
from foresay.verifier.model.rope import half_split_order
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.attention import join_latents
from foresay.verifier.ops.launch import empty
from foresay.verifier.ops.records import Norm, Rotation
from foresay.verifier.ops.rows import norm


@dataclass(slots=True)
class PackedMLA:
    """The products besides the latent's own, C, and the output's. down: into the queries' narrower input, with its
    norm. nope, rope: the queries' N and P numbers, of all heads; key_rope: the key's P. keys, values: each
    head's matrix, N to C and C to V. norm: of latents."""

    nope: Linear
    rope: Linear
    key_rope: Linear
    keys: Linear
    values: Linear
    norm: Norm
    down: Linear | None = None
    down_norm: Norm | None = None

    @property
    def linears(self) -> list[Linear]:
        """Its products."""
        own = (self.nope, self.rope, self.key_rope, self.keys, self.values, self.down)
        return [one for one in own if one is not None]

    @classmethod
    def pack(cls, node: MLA, weights: LayerWeights, dtype: torch.dtype, rounds: bool) -> tuple[PackedMLA, LayerWeights]:
        """Pack them. Also returns the layer's weights with QKV making only the latent."""
        matrices, vectors = weights.matrices, weights.vectors
        whole, heads = matrices[QKV], node.heads
        queries = torch.arange(heads * (node.nope_dim + node.rotary_dim)).view(heads, -1)
        apart = None if node.rope is None else half_split_order(node.rope, node.rotary_dim)
        order = torch.arange(node.rotary_dim) if apart is None else apart

        def part(name: str, rows: Tensor) -> Linear:
            return Linear(matrices[name][rows.flatten().to(whole.device)], None, dtype, rounds=rounds)

        def norm_of(module: str) -> Norm:
            return Norm(vectors[f"{module}.weight"], node.inner_norm.eps)

        keys, values = (Linear(matrices[name], None, dtype, experts=node.heads) for name in (HEAD_KEYS, HEAD_VALUES))
        made = cls(
            part(QUERIES, queries[:, : node.nope_dim]),
            part(QUERIES, queries[:, node.nope_dim + order]),
            part(QKV, node.kv_lora_rank + order),
            keys,
            values,
            norm_of(LATENT_NORM),
        )
        if node.q_lora_rank is not None:
            made.down, made.down_norm = part(QUERY_DOWN, torch.arange(node.q_lora_rank)), norm_of(QUERY_NORM)
        latent = whole[torch.arange(node.kv_lora_rank, device=whole.device)]
        return made, LayerWeights({**matrices, QKV: latent}, weights.biases, vectors)

    def project_and_store(
        self, latent: Linear, normed: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, count: Tensor | None
    ) -> Tensor:
        """[R, Q, C + P]: the queries of the rows, on latents; stores their latents in their slots."""
        own = norm(latent(normed, count), self.norm, count)
        join_latents(own, self.key_rope(normed, count), rotation, keys, slots, count)
        if self.down is not None and self.down_norm is not None:
            normed = norm(self.down(normed, count), self.down_norm, count)
        plain, turning = self.keys.per_head(self.nope(normed, count), count), self.rope(normed, count)
        room = empty((len(normed), self.keys.out_features // own.shape[1], keys.shape[-1]), normed)
        return join_latents(plain, turning, rotation, room, None, count)
