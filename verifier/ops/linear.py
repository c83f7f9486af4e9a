"""Products of rows with a large weight, and what is done to them before they are stored.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from verifier.ops.eager import compiled


class PackedWeight(Protocol):
    """A weight [O, K] with its bias, laid out for its device: everything that :func:`packed_linear` asks of one.

    gated: the first half of the outputs are gates of the second.
    """

    @property
    def on_gpu(self) -> bool:
        """Whether kernels of a GPU multiply it."""

    @property
    def outer(self) -> int:
        """O."""

    @property
    def gated(self) -> bool:
        """Whether what comes out is ``silu(gate) * up``."""

    @property
    def nbytes(self) -> int:
        """What a product reads of memory, bias aside."""

    def plain(self) -> Tensor:
        """[O, K]: the weight that it stands for."""

    def plain_bias(self) -> Tensor | None:
        """[O]: the bias as it was."""

    def multiply(self, x: Tensor, out: Tensor, count: Tensor | None) -> None:
        """``out = x @ weight.T + bias``, rounded; of a gated weight ``silu(gate) * up``.

        x: [R, K], out: [R, O or O / 2], contiguous. count: int64[1], of how many rows (on a CPU; None: all); a row's
        bits do not depend on it.
        """


def packed_linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype, count: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of a packed weight; of a gated one ``silu(gate) * up``, see below.

    x: [R, K], contiguous. Returns [R, O] (or [R, O / 2]), rounded to ``dtype``. Sums are in fp32, and a row has the
    same bits with any number of rows. count: int64[1], of how many rows, read when it runs (of a CPU's kernels; None:
    all).
    """
    shape = len(x), weight.outer // (2 if weight.gated else 1)
    if x.is_cuda:
        out = x.new_empty(shape, dtype=dtype)
        weight.multiply(x, out, None)
        return out
    if weight.on_gpu or not compiled(x):
        bias, plain = weight.plain_bias(), weight.plain().to(x.dtype)
        product = (gated_linear if weight.gated else linear)(x, plain, None if bias is None else bias.to(x.dtype))
        return product.to(dtype)
    from verifier.ops.kernels.cpu.launch import room

    out = room(shape, dtype)
    weight.multiply(x, out, count)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, rounded, then ``+ residual``, rounded again. Returns [R, O] of x's dtype.

    x: [R, K]. weight: [O, K]. bias: [O]. residual: [R, O]. All of one dtype and contiguous. On a GPU sums are in fp32
    and a row has the same bits with any number of rows.
    """
    if x.is_cuda:
        from verifier.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, residual)
    product = functional.linear(x, weight, bias)
    return product if residual is None else product + residual


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` for the two halves of ``x @ weight.T + bias``, gate first. Returns [R, O / 2].

    Both halves are rounded to x's dtype before, and silu's result is too: the same steps as the product and the
    activation one after the other (:func:`verifier.ops.activation.silu_mul`).
    """
    if x.is_cuda:
        from verifier.ops.kernels import linear as kernels

        return kernels.gated_linear(x, weight, bias)
    gate, up = functional.linear(x, weight, bias).chunk(2, dim=-1)
    return torch.mul(functional.silu(gate), up)
