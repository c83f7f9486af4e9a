"""Linear layers whose rows have the same bits in any batch.

A weight is packed once for its device and multiplied by a kernel of ours
(:mod:`foresay.verifier.ops.kernels.cpu.product`, :mod:`foresay.verifier.ops.kernels.linear`). Where a CPU computes in
fp32, weights stay in 16 bits if these are exact, as for a bf16 or fp16 checkpoint: so a step, which reads every weight,
reads half as much. A quantised one keeps its few bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from foresay.verifier.model.expert_offload import lay_out_experts
from foresay.verifier.ops.experts import expert_linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.kernels.cpu.integers import PackedIntegers
from foresay.verifier.ops.kernels.cpu.linear import PackedFloats
from foresay.verifier.ops.linear import PackedWeight, head_linear, packed_linear, split_k_linear
from foresay.verifier.ops.quant_groups import GROUP
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import ExpertRows, Gate, SplitKSums
from foresay.verifier.ops.rows import take_columns

#: A weight as in a checkpoint, [out, in].
Matrix = Tensor | QuantizedMatrix


class Linear:
    """``x @ weight.T + bias`` for x [R, in]. Owns its packed weight, [out, in], and computes on its device.

    dtype, device: of input and output; dtype is the weight's unless given. gated: the activation applied to the
    product (:meth:`gated`). rounds: inputs are rounded to 8 bits if there are kernels for the weight
    (:mod:`foresay.verifier.ops.linear`). experts: see :meth:`per_expert`. spills: the device, if that is a GPU without
    room for all experts (:mod:`foresay.verifier.model.expert_offload`); then a weight of experts may be on the CPU.
    """

    __slots__ = ("_packed", "_permutation", "device", "dtype", "in_features", "out_features")

    def __init__(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        gated: Gate = "",
        rounds: bool = False,
        experts: int = 0,
        spills: torch.device | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = (
            dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32),
            spills or weight.device,
        )
        self._permutation: Tensor | None = None  # the index in an input row for each of the weight's numbers
        if isinstance(weight, QuantizedMatrix):
            weight, was = weight.side_by_side()
            self._permutation = None if was is None else was.to(self.device)
        self._packed = _packed(weight, bias, gated, self.dtype, rounds, experts, spills)

    @classmethod
    def from_packed(cls, packed: PackedWeight, permutation: Tensor | None, dtype: torch.dtype) -> Linear:
        """A layer on a CPU whose weight is already packed; see :attr:`packed`."""
        made = cls.__new__(cls)
        made.out_features, made.in_features = packed.outer, packed.inner
        made.dtype, made.device = dtype, torch.device("cpu")
        made._packed, made._permutation = packed, permutation
        return made

    @property
    def packed(self) -> tuple[PackedWeight | BlockedWeight, Tensor | None]:
        """The packed weight, and the index in an input row for each of its numbers; None: the same."""
        return self._packed, self._permutation

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads for the weight."""
        return self._packed.nbytes

    def __call__(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out], rounded. count: int64[1], of how many rows, read when it runs (on a CPU; None: all)."""
        return packed_linear(self._taken(x, count), self._packed, self.dtype, count)

    def split_k(self, x: Tensor, count: Tensor | None = None) -> Tensor | SplitKSums:
        """The same, possibly unfinished, for an op that can finish it."""
        return split_k_linear(self._taken(x, count), self._packed, self.dtype, count)

    def wide(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """The same in fp32, not rounded."""
        return packed_linear(self._taken(x, count), self._packed, torch.float32, count)

    def gated(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out / 2]: ``act(gate) * up`` of the two halves of the product, gate first; or [R, out]:
        ``relu(x) ** 2`` of all of it."""
        return packed_linear(self._taken(x, count), self._packed, self.dtype, count)

    def per_expert(self, x: Tensor, rows: ExpertRows, dtype: torch.dtype | None = None) -> Tensor:
        """[P, in] -> [P, out / experts], possibly gated: each row times the weight of its expert; the experts' weights
        are stacked (:func:`~foresay.verifier.ops.experts.expert_linear`). dtype: of the output."""
        return expert_linear(self._taken(x, rows.spans[2:]), self._packed, dtype or self.dtype, rows)

    def per_head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, heads * in] -> [R, out]: of each head with its own part of the weight, as of experts."""
        assert self._permutation is None, "columns of a head's matrix are in order"
        return head_linear(x, self._packed, self.dtype, count)

    def _taken(self, x: Tensor, count: Tensor | None) -> Tensor:
        return x if self._permutation is None else take_columns(x, self._permutation, count)


def _packed(
    weight: Matrix,
    bias: Tensor | None,
    gated: Gate,
    compute: torch.dtype,
    rounds: bool,
    experts: int,
    spills: torch.device | None,
) -> PackedWeight | BlockedWeight:
    if isinstance(weight, Tensor) and weight.requires_grad:
        return cast("PackedWeight", TrainableWeight(weight, bias, gated))
    if isinstance(weight, QuantizedMatrix):
        kept = replace(weight, scales=_kept(weight.scales, torch.float32))
        if spills is not None and experts:
            return lay_out_experts(kept, bias, gated, experts, spills)
        if weight.device.type != "cpu":
            return BlockedWeight.pack(kept, bias, gated, experts)
        return PackedIntegers.pack(kept, bias, gated, compute, rounds and can_round(weight), experts)
    if spills is not None and experts:
        return lay_out_experts(weight.to(compute), bias, gated, experts, spills)
    if weight.device.type != "cpu":
        return BlockedWeight.pack(weight.to(compute), bias, gated, experts)
    return PackedFloats.pack(_kept(weight, compute), bias, gated, experts)


@dataclass(slots=True)
class TrainableWeight:
    """A weight in training, which is not packed: products with it are by reference."""

    weight: Tensor
    bias: Tensor | None
    gated: Gate

    def rounded(self, x: Tensor) -> None:
        """It rounds no rows."""

    def plain(self) -> Tensor:
        """[O, K]."""
        return self.weight

    def plain_bias(self) -> Tensor | None:
        """[O]."""
        return self.bias


def can_round(weight: QuantizedMatrix) -> bool:
    """Whether there are kernels that multiply it with rounded inputs: it must have integers, in whole groups of
    inputs."""
    return not weight.floats and weight.inner % GROUP == 0


def _kept(weight: Tensor, compute: torch.dtype) -> Tensor:
    """The weight in the dtype that it is packed in."""
    if compute is not torch.float32:
        return weight.to(compute)
    if weight.dtype is not torch.float32:  # scales of 8 bits among them
        return weight
    narrow = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((kept for kept in narrow if torch.equal(kept.float(), weight)), weight)
