"""Embeddings of each layer's own, as Gemma 4's small models have them: what they are described by. Imports no torch.

::

    p = (norm(project(x) / sqrt(H)) + table[token] * sqrt(P)) / sqrt(2)      x: a row's embedding; p: P numbers a layer
    x += norm(back(gelu(gate(x)) * p of this layer))                         the last thing that a layer adds

The table is by far the largest tensor of such a model, and a pass reads one row of it for each of its rows: so it is
never packed, and a CPU leaves it in the mapped file, unless that has it in few bits: kernels read floats.

Legend: H hidden width, P width of these embeddings, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foresay.verifier.model.products import NormKind, Product, Vector

#: A model's table, its projection of embeddings, and the norm of what that makes.
TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION, PROJECTION_NORM = "model.per_layer_model_projection", "model.per_layer_projection_norm"
#: A layer's two products, which are called after their modules in files, and its norm.
GATE, BACK, NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """width: P. tokens: rows of the table. norm: of all its norms. in_blocks: whether a GGUF file has the table in few
    bits."""

    width: int
    tokens: int
    norm: NormKind
    in_blocks: bool = False

    def table(self, layers: int) -> tuple[int, int]:
        """The shape of the table."""
        return self.tokens, layers * self.width

    def projection(self, hidden: int, layers: int) -> Product:
        """The model's product, from the embedding to P numbers of each layer."""
        return Product(PROJECTION, {PROJECTION: layers * self.width}, hidden)

    def outside(self) -> Iterator[Vector]:
        """The vectors of the model's part."""
        yield from self.norm.vectors(PROJECTION_NORM, self.width)

    def products(self, hidden: int) -> tuple[Product, Product]:
        """Those of each layer."""
        return Product(GATE, {GATE: self.width}, hidden), Product(BACK, {BACK: hidden}, self.width)

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """Those of each layer."""
        yield from self.norm.vectors(NORM, hidden)
