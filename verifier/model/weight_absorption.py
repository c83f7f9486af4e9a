"""The packed weights of latent attention (:mod:`foresay.verifier.model.mla`, whose letters are used here)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mla import HEAD_KEYS, HEAD_VALUES, LATENT_NORM, QUERIES, QUERY_DOWN, QUERY_NORM, Latent
from foresay.verifier.model.products import QKV
from foresay.verifier.model.rope import pairs_apart
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.attention import join_latents
from foresay.verifier.ops.launch import new
from foresay.verifier.ops.records import Norm, Rotation
from foresay.verifier.ops.rows import norm


@dataclass(slots=True)
class PackedLatent:
    """The products besides the latent's own, C, and the output's. down: into the queries' narrower input, with its
    norm. plain, turning: the queries' N and P numbers, of all heads; key_turning: the key's P. keys, values: each
    head's matrix, N to C and C to V. norm: of latents."""

    plain: Linear
    turning: Linear
    key_turning: Linear
    keys: Linear
    values: Linear
    norm: Norm
    down: Linear | None = None
    down_norm: Norm | None = None

    @property
    def linears(self) -> list[Linear]:
        """Its products."""
        own = (self.plain, self.turning, self.key_turning, self.keys, self.values, self.down)
        return [one for one in own if one is not None]

    @classmethod
    def of(
        cls, node: Latent, weights: LayerWeights, dtype: torch.dtype, rounds: bool
    ) -> tuple[PackedLatent, LayerWeights]:
        """Pack them. Also returns the layer's weights with QKV making only the latent."""
        matrices, vectors = weights.matrices, weights.vectors
        whole, queries = matrices[QKV], torch.arange(node.heads * (node.plain + node.turning)).view(node.heads, -1)
        apart = None if node.rope is None else pairs_apart(node.rope, node.turning)
        order = torch.arange(node.turning) if apart is None else apart

        def part(name: str, rows: Tensor) -> Linear:
            return Linear(matrices[name][rows.flatten().to(whole.device)], None, dtype, rounds=rounds)

        def norm_of(module: str) -> Norm:
            return Norm(vectors[f"{module}.weight"], node.inner.eps)

        keys, values = (Linear(matrices[name], None, dtype, experts=node.heads) for name in (HEAD_KEYS, HEAD_VALUES))
        made = cls(
            part(QUERIES, queries[:, : node.plain]),
            part(QUERIES, queries[:, node.plain + order]),
            part(QKV, node.latent + order),
            keys,
            values,
            norm_of(LATENT_NORM),
        )
        if node.rank is not None:
            made.down, made.down_norm = part(QUERY_DOWN, torch.arange(node.rank)), norm_of(QUERY_NORM)
        latent = whole[torch.arange(node.latent, device=whole.device)]
        return made, LayerWeights({**matrices, QKV: latent}, weights.biases, vectors)

    def placed(
        self, latent: Linear, normed: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, count: Tensor | None
    ) -> Tensor:
        """[R, Q, C + P]: the queries of the rows, on latents; stores their latents in their slots."""
        own = norm(latent(normed, count), self.norm, count)
        join_latents(own, self.key_turning(normed, count), rotation, keys, slots, count)
        if self.down is not None and self.down_norm is not None:
            normed = norm(self.down(normed, count), self.down_norm, count)
        plain, turning = self.keys.of_heads(self.plain(normed, count), count), self.turning(normed, count)
        room = new((len(normed), self.keys.out_features // own.shape[1], keys.shape[-1]), normed)
        return join_latents(plain, turning, rotation, room, None, count)
