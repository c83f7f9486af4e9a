"""Linear layers whose rows have the same bits in any company.

On a CPU the weights are packed once: for FBGEMM where the layer computes in fp32 and fp16 holds its weights
(:mod:`verifier.model.half`), else for oneDNN. Measured on two processors (with and without bf16 instructions): with
oneDNN a row's result is the same in a product of 2 rows and of thousands, in bf16 and fp32; a product of one row, and
torch's own fp32 ``linear`` at different row counts, are not. Where the start-up probe finds otherwise, products run in
blocks of one fixed number of rows (:attr:`Linear.block`).

On a GPU the weight is kept as it is, and :mod:`verifier.ops.linear` multiplies, with the epilogues that save a launch.
They round as the separate steps do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from spec.tree import MAX_NODES
from verifier.model import half
from verifier.ops.activation import silu_mul
from verifier.ops.linear import gated_linear, linear

#: oneDNN keeps code for every number of rows of every matrix that it has seen (0.3 to 0.6 MB in fp32 on AVX2, some of
#: it for ever), and takes a millisecond to make it. So passes of more rows than a tree has come in steps of these.
_STEP = 8


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this machine (the ops are private to torch: look first)."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not (known and torch.backends.mkldnn.is_available()):
        return False
    # Packing bf16 raises on a processor that has no instructions for it.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class OneDnnWeight:
    """``x @ weight.T + bias`` for one weight [out, in], packed for oneDNN, and x of its dtype."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8), bias

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def _pack(weight: Tensor, bias: Tensor | None) -> half.HalfWeight | OneDnnWeight | None:
    """The weight as a CPU multiplies it best; None where it stays as it is."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype is torch.float32 and half.usable() and half.holds(weight):
        return half.HalfWeight(weight, bias)
    return OneDnnWeight(weight, bias) if packable(weight.dtype) else None


class Linear:
    """``x @ weight.T + bias`` for x [R, in], R at least 2. Owns its (packed) weight, [out, in], and computes on its
    device.

    dtype, device: of x and of what comes out; dtype is the weight's unless given.
    """

    __slots__ = ("_bias", "_packed", "_weight", "block", "device", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        weight = weight if dtype is None else weight.to(dtype)
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.block: int | None = None
        self._packed = _pack(weight, bias)
        self._weight = weight if self._packed is None else weight.new_empty(0)  # one copy is enough
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """What a product reads of memory for the weight."""
        item = 2 if isinstance(self._packed, half.HalfWeight) else self.dtype.itemsize
        return self.in_features * self.out_features * item

    def fitting(self, rows: int) -> int:
        """How many rows to give where there are so many, two at least: fewer are padded here, their bits differ, or
        each number of them costs memory."""
        several = max(2, rows)
        if isinstance(self._packed, half.HalfWeight):
            return half.fitting(several)
        return (
            -(-several // _STEP) * _STEP if isinstance(self._packed, OneDnnWeight) and several > MAX_NODES else several
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out]: the product, rounded; then ``residual`` [R, out] is added, and the sum rounded."""
        if self.block is None and self.device.type != "cpu":
            return linear(x, self._weight, self._bias, residual)
        product = self._product(x) if self.block is None else self._in_blocks(x, self.block)
        return product if residual is None else residual + product

    def gated(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out / 2]: ``silu(gate) * up`` of the two halves of the product, gate first."""
        if self.block is None and self.device.type != "cpu":
            return gated_linear(x, self._weight, self._bias)
        return silu_mul(self(x))

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias) if self._packed is None else self._packed(x)

    def _in_blocks(self, x: Tensor, block: int) -> Tensor:
        """The product in blocks of exactly ``block`` rows, the last one padded."""
        rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -rows % block))
        return torch.cat([self._product(part) for part in padded.split(block)])[:rows]
