"""Linear layers whose rows have the same bits in any company.

On a CPU the weights are packed once: for FBGEMM where the layer computes in fp32 and fp16 holds its weights
(:mod:`verifier.model.half`), else for oneDNN. A row's bits depend on how many rows there are: nearly everywhere in a
product of one, on processors with AMX in bf16 at many numbers, with torch's own ``linear`` in fp32 too. So a target's
products are asked at start-up, and made of the numbers of rows that agree (:attr:`Linear.counts`).

On a GPU the weight is kept as it is, and :mod:`verifier.ops.linear` multiplies, with the epilogues that save a launch.
They round as the separate steps do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifier.model import half
from verifier.model.rows import RowCounts, agreeing, random_rows
from verifier.ops.activation import silu_mul
from verifier.ops.linear import gated_linear, linear

#: Numbers of rows that a product is asked about: each small one, since a step has those, then ever fewer. oneDNN has no
#: others whoever multiplies: it keeps code for each (0.3 to 0.6 MB), and takes a millisecond to make it.
ROWS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 128, 256)
_UNTRIED = RowCounts(ROWS)
#: All are held against products of so many rows: as few as cost little more than two.
GROUP = 8
#: The most weights of a matrix that is made for it: of a larger one, so many columns as come to that.
_TRIED = 1 << 24
#: What is left where terms cancel: bf16 tells apart of it what fp32 does of the terms.
_LEFT = 2.0**-16


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

    dtype, device: of x and of what comes out; dtype is the weight's unless given. counts: the numbers of rows to
    multiply; None: any.
    """

    __slots__ = ("_bias", "_packed", "_weight", "counts", "device", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        weight = weight if dtype is None else weight.to(dtype)
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self._packed = _pack(weight, bias)
        self.counts = _UNTRIED if isinstance(self._packed, OneDnnWeight) else None
        self._weight = weight if self._packed is None else weight.new_empty(0)  # one copy is enough
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """What a product reads of memory for the weight."""
        item = 2 if isinstance(self._packed, half.HalfWeight) else self.dtype.itemsize
        return self.in_features * self.out_features * item

    def fitting(self, rows: int) -> int:
        """How many rows to give where there are so many, two at least: fewer are padded here, or their bits differ."""
        several = max(2, rows)
        if isinstance(self._packed, half.HalfWeight):
            return half.fitting(several)
        return several if self.counts is None else self.counts.fitting(several)

    @property
    def kind(self) -> tuple[object, ...]:
        """What its products' bits depend on besides the numbers: one of a kind is asked for all."""
        return self.in_features, self.out_features, self.dtype, type(self._packed), self._bias is None

    def agreeing(self, most: int) -> RowCounts | None:
        """The numbers of rows up to ``most`` in whose products rows have the same bits, tried now; None: any has.

        Tried with a layer of this kind whose large terms cancel, so that the errors of its sums are as large as what is
        left: another order shows in almost every number, where in products rounded to bf16 it does in one of 30,000.
        """
        if self.device.type != "cpu" or isinstance(self._packed, half.HalfWeight):
            return None  # sums of our own kernels, and numbers that are tried already
        width = self.in_features
        weight = _cancelling(min(self.out_features, max(1, _TRIED // width)), width, 1.0, 1.0).to(self.dtype)
        layer = Linear(weight, None if self._bias is None else self._bias.new_zeros(len(weight)))
        x = _cancelling(most, width, -1.0, _LEFT).to(self.dtype)
        agreed = agreeing(layer._product, x, GROUP, (count for count in ROWS if count <= most))
        if len(weight) < self.out_features:  # so many results that one of 30,000 is enough
            agreed = agreeing(self._product, random_rows(most, width).to(self.dtype), GROUP, agreed)
        return RowCounts(agreed or [GROUP])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, in] -> [R, out]: the product, rounded; then ``residual`` [R, out] is added, and the sum rounded."""
        if self.device.type != "cpu":
            return linear(x, self._weight, self._bias, residual)
        product = self._product(x) if self.counts is None else self.counts.multiply(self._product, x)
        return product if residual is None else residual + product

    def gated(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out / 2]: ``silu(gate) * up`` of the two halves of the product, gate first."""
        if self.device.type != "cpu":
            return gated_linear(x, self._weight, self._bias)
        return silu_mul(self(x))

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias) if self._packed is None else self._packed(x)


def _cancelling(rows: int, width: int, sign: float, left: float) -> Tensor:
    """fp32[rows, width]: random numbers, the same again times ``sign``, and others times ``left``, all mixed."""
    terms = width * 3 // 8
    numbers, others = random_rows(rows, terms), random_rows(rows, width - 2 * terms, seed=1)
    order = random_rows(1, width)[0].argsort()
    return torch.cat((numbers, sign * numbers, left * others), dim=1)[:, order]
