"""Multi-head latent attention (DeepSeek-V2): of a token one vector is kept, which all heads share. Imports no torch.

::

    latent    H -> C, normalised; H -> P, rotated: kept as one key of C + P numbers, of which the first C are its value
    queries   H -> (H', normalised ->) Q heads of N + P numbers; the N become C by a matrix of the head, the P rotate
    output    of each head C numbers, which become V by a matrix of the head; all heads' together -> H

The heads' two matrices are one tensor in checkpoints, which would make N + V numbers of a head of each latent. They are
applied to queries and outputs instead (absorbed), in steps and prompts alike: so a row's bits are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foresay.verifier.model.layers import Attention
from foresay.verifier.model.products import MODULES, OUTPUT, QKV, NormKind, Product, Stacked, Vector

#: Products besides the latent's (QKV) and the output's: into the queries' narrower input; the queries; of each head.
QUERY_DOWN, QUERIES, HEAD_KEYS, HEAD_VALUES = "query_down", "queries", "head_keys", "head_values"
#: The norms of latents and of the queries' narrower input.
LATENT_NORM, QUERY_NORM = "self_attn.kv_a_layernorm", "self_attn.q_a_layernorm"
_BOTH = "self_attn.kv_b_proj.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Attention):
    """One kv head of ``head_dim`` numbers: C of the latent, and P that are rotated.

    latent: C. plain: N. value: V. rank: H'; None: queries read the layer's input. inner: the norm of latents, and of
    queries' narrower input.
    """

    latent: int
    plain: int
    value: int
    rank: int | None
    inner: NormKind

    @property
    def turning(self) -> int:
        """P."""
        return self.head_dim - self.latent

    @property
    def kept_value(self) -> int:
        """None: values are part of the keys."""
        return 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """In the order in which they are computed."""
        source = hidden if self.rank is None else self.rank
        queries = f"self_attn.{'q_proj' if self.rank is None else 'q_b_proj'}"
        down = () if self.rank is None else (Product(QUERY_DOWN, {"self_attn.q_a_proj": self.rank}, hidden),)
        return (
            Product(QKV, {"self_attn.kv_a_proj_with_mqa": self.head_dim}, hidden),
            *down,
            Product(QUERIES, {queries: self.heads * (self.plain + self.turning)}, source),
            self._of_heads(HEAD_KEYS, "k_b_proj", self.latent, self.plain),
            self._of_heads(HEAD_VALUES, "v_b_proj", self.value, self.latent),
            Product(OUTPUT, {MODULES[OUTPUT][0]: hidden}, self.heads * self.value),
        )

    def _of_heads(self, name: str, module: str, outer: int, inner: int) -> Product:
        """A matrix of each head. In the tensor of both a head's rows for keys, which are transposed, come first."""
        rows = {f"self_attn.heads.{head}.{module}": outer for head in range(self.heads)}
        every, keys = self.plain + self.value, name == HEAD_KEYS
        both = Stacked(_BOTH, transposed=keys, among=(0, inner, every) if keys else (self.plain, every, every))
        stacked = both, Stacked(f"self_attn.{module}.weight")
        return Product(name, rows, inner, experts=self.heads, chosen=self.heads, stacked=stacked)

    def vectors(self) -> Iterator[Vector]:
        """Its norms' weights."""
        yield from self.inner.vectors(LATENT_NORM, self.latent)
        if self.rank is not None:
            yield from self.inner.vectors(QUERY_NORM, self.rank)
