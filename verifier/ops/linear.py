"""Products of a few rows with a large weight, and what is done to them before they are stored.

On a CPU the model multiplies through :class:`verifier.model.linear.Linear`; these are the same products as a GPU makes
them, with the epilogues that save a launch.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
