"""The packed weights of embeddings that layers have of their own (:mod:`foresay.verifier.model.per_layer`, whose
letters are used here)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.linear import Linear
from foresay.verifier.model.per_layer import BACK, GATE, NORM, PROJECTION_NORM, PerLayerEmbedding
from foresay.verifier.ops.records import Norm
from foresay.verifier.ops.rows import gate_inputs, layer_inputs, norm


@dataclass(slots=True)
class PackedInputs:
    """The model's part. factor: of what is projected. scale: of the table's rows, rounded to the dtype of
    activations."""

    projection: Linear
    norm: Norm
    factor: float
    scale: float

    @classmethod
    def of(cls, node: PerLayerEmbedding, projection: Linear, vectors: Mapping[str, Tensor]) -> PackedInputs:
        """vectors: of :meth:`PerLayerEmbedding.outside`."""
        scale = float(torch.tensor(math.sqrt(node.width)).to(projection.dtype))
        own = Norm(vectors[f"{PROJECTION_NORM}.weight"], node.norm.eps)
        return cls(projection, own, 1 / math.sqrt(projection.in_features), scale)

    def __call__(self, table: Tensor, x: Tensor, tokens: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, L * P]: the inputs of all layers. x: [R, H], the embeddings of the tokens."""
        made = self.projection.split_k(x, count)
        return layer_inputs(made, x.dtype, table, tokens, self.norm, (self.factor, self.scale), count)


@dataclass(slots=True)
class PackedGate:
    """A layer's part."""

    gate: Linear
    back: Linear
    norm: Norm

    @classmethod
    def of(cls, node: PerLayerEmbedding, linear: Callable[[str], Linear], vectors: Mapping[str, Tensor]) -> PackedGate:
        """linear: packs one of the layer's products."""
        return cls(linear(GATE), linear(BACK), Norm(vectors[f"{NORM}.weight"], node.norm.eps))

    def __call__(self, x: Tensor, inputs: Tensor, number: int, count: Tensor | None = None) -> Tensor:
        """[R, H]: what is added to the stream x. inputs: of all layers. number: of this one."""
        gated = gate_inputs(self.gate.split_k(x, count), inputs, number, count)
        return norm(self.back(gated, count), self.norm, count)
