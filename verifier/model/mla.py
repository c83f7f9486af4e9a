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
class MLA(Attention):
    """One kv head of ``head_dim`` numbers: C of the latent, and P that are rotated.

    kv_lora_rank: C. nope_dim: N. v_head_dim: V. q_lora_rank: H'; None: queries read the layer's input. inner_norm: of
    latents, and of queries' narrower input.
    """

    kv_lora_rank: int
    nope_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    inner_norm: NormKind

    @property
    def rotary_dim(self) -> int:
        """P."""
        return self.head_dim - self.kv_lora_rank

    @property
    def cached_value_dim(self) -> int:
        """None: values are part of the keys."""
        return 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """In the order in which they are computed."""
        source, rank = self.q_lora_rank or hidden, self.q_lora_rank
        queries = f"self_attn.{'q_proj' if rank is None else 'q_b_proj'}"
        down = () if rank is None else (Product(QUERY_DOWN, {"self_attn.q_a_proj": rank}, hidden),)
        return (
            Product(QKV, {"self_attn.kv_a_proj_with_mqa": self.head_dim}, hidden),
            *down,
            Product(QUERIES, {queries: self.heads * (self.nope_dim + self.rotary_dim)}, source),
            self._of_heads(HEAD_KEYS, "k_b_proj", self.kv_lora_rank, self.nope_dim),
            self._of_heads(HEAD_VALUES, "v_b_proj", self.v_head_dim, self.kv_lora_rank),
            Product(OUTPUT, {MODULES[OUTPUT][0]: hidden}, self.heads * self.v_head_dim),
        )

    def _of_heads(self, name: str, module: str, outer: int, inner: int) -> Product:
        """A matrix of each head. In the tensor of both a head's rows for keys, which are transposed, come first."""
        rows = {f"self_attn.heads.{head}.{module}": outer for head in range(self.heads)}
        every, keys = self.nope_dim + self.v_head_dim, name == HEAD_KEYS
        both = Stacked(_BOTH, transposed=keys, among=(0, inner, every) if keys else (self.nope_dim, every, every))
        stacked = both, Stacked(f"self_attn.{module}.weight")
        return Product(name, rows, inner, experts=self.heads, top_k=self.heads, stacked=stacked)

    def vectors(self) -> Iterator[Vector]:
        """Its norms' weights."""
        yield from self.inner_norm.vectors(LATENT_NORM, self.kv_lora_rank)
        if self.q_lora_rank is not None:
            yield from self.inner_norm.vectors(QUERY_NORM, self.q_lora_rank)
