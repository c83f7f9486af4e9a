"""The packed weights of mixtures of experts, besides the experts' own products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.feed_forward import MLP, Experts
from foresay.verifier.model.layers import Layer
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.products import SHARED_DOWN, SHARED_GATE_UP
from foresay.verifier.ops.records import Norm, Routing


@dataclass(slots=True)
class PackedExperts:
    """The parts of a mixture layer besides the experts' products. router: H to a logit of each expert, and of the
    shared one's gate, in fp32. remainder: what a GPU, which multiplies numbers of one dtype, rounds off its weight;
    None: nothing. correction, factors: fp32[experts]. shared: the products into and out of the shared expert. reads:
    the norm of what the router reads, if that is not what experts read."""

    routing: Routing
    router: Linear
    correction: Tensor | None
    shared: tuple[Linear, Linear] | None
    remainder: Linear | None = None
    factors: Tensor | None = None
    reads: Norm | None = None

    @property
    def gated(self) -> bool:
        """Whether the shared expert has a gate."""
        return self.router.out_features > self.routing.experts

    @classmethod
    def pack(
        cls,
        node: Experts,
        vectors: Mapping[str, Tensor],
        shared: tuple[Linear, Linear] | None,
        dtype: torch.dtype,
        eps: float,
    ) -> PackedExperts:
        """vectors: the layer's. dtype: of activations. eps: of a norm of the router's own."""
        how, rows = node.router, [vectors[f"{node.router.module}.weight"]]
        bias = vectors.get(f"{how.module}.bias")
        if node.shared_gate is not None:
            rows.append(vectors[f"{node.shared_gate}.weight"])
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(1)))
        kind = node.count, node.top_k, how.sigmoid, how.groups, how.norm_topk, how.scale
        correction, factors = (None if name is None else vectors[name] for name in (how.correction, how.factors))
        reads = None if how.scaled is None else Norm(vectors[how.scaled] * (1 / math.sqrt(rows[0].shape[1])), eps)
        whole, left = torch.cat(rows), None
        if whole.device.type != "cpu":
            rounded_off = whole - whole.to(dtype).float()
            left = Linear(rounded_off, None, dtype) if bool(rounded_off.any()) else None
        else:
            dtype = whole.dtype
        return cls(Routing(*kind), Linear(whole, bias, dtype), correction, shared, left, factors, reads)


@dataclass(slots=True)
class PackedDenseMLP:
    """An MLP that stands beside a layer's experts: its products, and the norm of its output; and those of the input
    and of the output of the experts."""

    products: tuple[Linear, Linear]
    after_dense: Norm
    before_experts: Norm
    after_experts: Norm

    @classmethod
    def pack(
        cls, layer: Layer, linear: Callable[..., Linear], around: Callable[[str | None], Norm | None]
    ) -> PackedDenseMLP:
        """linear, around: pack a product and a norm of the layer."""
        assert isinstance(layer.mlp, MLP), "experts stand beside it"
        names = layer.norms.after_dense, layer.norms.before_experts, layer.norms.after_experts
        norms = [one for one in map(around, names) if one is not None]
        return cls((linear(SHARED_GATE_UP, layer.mlp.activation), linear(SHARED_DOWN)), *norms)
