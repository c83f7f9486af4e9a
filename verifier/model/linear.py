"""Linear layers whose rows have the same bits in any company.

On a CPU the weight is packed once and multiplied by a kernel of ours (:mod:`verifier.ops.kernels.cpu.linear`). What is
computed in fp32 keeps a weight in 16 bits where they hold all of it, as those of a bf16 or fp16 checkpoint do: a step
that reads every weight reads half as much. On a GPU the weight is kept as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifier.ops.kernels.cpu.linear import PackedWeight
from verifier.ops.linear import gated_linear, linear, packed_linear


class Linear:
    """``x @ weight.T + bias`` for x [R, in]. Owns its (packed) weight, [out, in], and computes on its device.

    dtype, device: of x and of what comes out; dtype is the weight's unless given. gated: the outputs are gates, and
    then as many numbers that they are for (:meth:`gated`).
    """

    __slots__ = ("_bias", "_gated", "_packed", "_weight", "device", "dtype", "in_features", "out_features")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, gated: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device, self._gated = dtype or weight.dtype, weight.device, gated
        self._packed, self._weight, self._bias = None, weight, bias
        if self.device.type == "cpu":
            self._packed = PackedWeight.of(_kept(weight, self.dtype), bias, gated)
            self._weight = weight.new_empty(0)  # one copy is enough
        elif self.device.type != "meta" or weight.dtype is not self.dtype:
            self._weight = weight.to(self.dtype)

    @property
    def nbytes(self) -> int:
        """What a product reads of memory for the weight."""
        item = self.dtype if self._packed is None else self._packed.data.dtype
        return self.in_features * self.out_features * item.itemsize

    def __call__(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out], rounded. count: int64[1], of how many rows, read when it runs (on a CPU; None: all)."""
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        return packed_linear(x, self._packed, self.dtype, count)

    def wide(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """The same as fp32, as it comes."""
        if self._packed is None:
            return linear(x, self._weight, self._bias).float()
        return packed_linear(x, self._packed, torch.float32, count)

    def gated(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out / 2]: ``silu(gate) * up`` of the two halves of the product, gate first."""
        if self._packed is None:
            return gated_linear(x, self._weight, self._bias)
        return packed_linear(x, self._packed, self.dtype, count)


def _kept(weight: Tensor, compute: torch.dtype) -> Tensor:
    """The weight in the dtype that it is packed in."""
    if compute is not torch.float32:
        return weight.to(compute)
    if weight.dtype is not torch.float32:
        return weight
    narrow = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((kept for kept in narrow if torch.equal(kept.float(), weight)), weight)
