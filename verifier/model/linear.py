"""Linear layers whose rows have the same bits in any company.

On a CPU the weights are packed once for oneDNN. Measured on two processors (with and without bf16 instructions): a
row's result is then the same in a product of 2 rows and of thousands, in bf16 and fp32; a product of one row, and
torch's own fp32 ``linear`` at different row counts, are not. Where the start-up probe finds otherwise, products run in
blocks of one fixed number of rows (:attr:`Linear.block`).

On a GPU the weight is kept as it is, and :mod:`verifier.ops.linear` multiplies, with the epilogues that save a launch.
They round as the separate steps do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from verifier.ops.activation import silu_mul
from verifier.ops.linear import gated_linear, linear


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this machine (the ops are private to torch: look first)."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not (known and torch.backends.mkldnn.is_available()):
        return False
    # Packing bf16 raises on a processor that has no instructions for it.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """``x @ weight.T + bias`` for x [R, in], R at least 2. Owns its (packed) weight, [out, in], and computes on its
    device."""

    __slots__ = ("_bias", "_on_cpu", "_packed", "_weight", "block", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.block: int | None = None
        self._bias = bias
        self._on_cpu = weight.device.type == "cpu"
        self._packed = self._on_cpu and packable(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8) if self._packed else weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return self._weight.device

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out]: the product, rounded; then ``residual`` [R, out] is added, and the sum rounded."""
        if self.block is None and not self._on_cpu:
            return linear(x, self._weight, self._bias, residual)
        product = self._product(x) if self.block is None else self._in_blocks(x, self.block)
        return product if residual is None else residual + product

    def gated(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out / 2]: ``silu(gate) * up`` of the two halves of the product, gate first."""
        if self.block is None and not self._on_cpu:
            return gated_linear(x, self._weight, self._bias)
        return silu_mul(self(x))

    def _product(self, x: Tensor) -> Tensor:
        if not self._on_cpu:
            return linear(x, self._weight, self._bias)
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    def _in_blocks(self, x: Tensor, block: int) -> Tensor:
        """The product in blocks of exactly ``block`` rows, the last one padded."""
        rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -rows % block))
        return torch.cat([self._product(part) for part in padded.split(block)])[:rows]
