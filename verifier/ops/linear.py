"""Products of rows with a large weight, and what is done to them before they are stored.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled, op
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.records import Gate, Partials


class PackedWeight(Protocol):
    """A weight [O, K] with its bias, laid out for a CPU: everything that :func:`packed_linear` asks of one. A GPU's is
    a :class:`~foresay.verifier.ops.kernels.blocked.BlockedWeight`.

    gated: what is done to the product.
    """

    @property
    def outer(self) -> int:
        """O."""

    @property
    def inner(self) -> int:
        """K."""

    @property
    def gated(self) -> Gate:
        """What is done to the product."""

    @property
    def nbytes(self) -> int:
        """What a product reads of memory, bias aside."""

    def plain(self) -> Tensor:
        """[O, K]: the weight that it stands for."""

    def rounded(self, x: Tensor) -> Tensor | None:
        """fp32[R, O]: what it makes of rows [R, K], bias and all, if it rounds them; None if it does not."""

    def plain_bias(self) -> Tensor | None:
        """[O]: the bias as it was."""

    def product(self, x: Tensor, dtype: torch.dtype, count: Tensor | None) -> Tensor | Partials:
        """As :func:`unfinished_linear`, by compiled kernels."""

    def segments(self) -> list[slice]:
        """The parts of K that are summed up apart: all of it is one."""


def packed_linear(
    x: Tensor, weight: PackedWeight | BlockedWeight, dtype: torch.dtype, count: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` of a packed weight, and what is done to it (:data:`~foresay.verifier.ops.records.Gate`).

    x: [R, K], contiguous. Returns [R, O], or [R, O / 2] of halves, rounded to ``dtype``. Sums are in fp32, and a row
    has the same bits with any number of rows. count: int64[1], of how many rows, read when it runs (of a CPU's kernels;
    None: all).
    """
    made = unfinished_linear(x, weight, dtype, count)
    return made if isinstance(made, Tensor) else finish(made, dtype, weight.gated)


def unfinished_linear(
    x: Tensor, weight: PackedWeight | BlockedWeight, dtype: torch.dtype, count: Tensor | None = None
) -> Tensor | Partials:
    """The same, but that a GPU leaves the sums of several segments, and the gate with them, to whoever reads it."""
    if isinstance(weight, BlockedWeight):
        if x.is_cuda:
            from foresay.verifier.ops.kernels import linear as kernels

            return kernels.product(x, weight, dtype)
    elif compiled(x):
        return weight.product(x, dtype, count)
    if (whole := weight.rounded(x)) is not None:
        return finish(Partials(whole.unsqueeze(0), None), dtype, weight.gated)
    bias, plain = weight.plain_bias(), weight.plain().to(x.dtype)
    segments = weight.segments()
    if len(segments) > 1:
        sums = [functional.linear(x[:, part].float(), plain[:, part].float()) for part in segments]
        return Partials(torch.stack(sums), bias)
    whole_bias = None if bias is None else bias.to(x.dtype)
    if weight.gated:
        return gated_linear(x, plain, whole_bias, weight.gated).to(dtype)
    return linear(x, plain, whole_bias).to(dtype)


@op(gpu="segments")
def finish(product: Partials, dtype: torch.dtype, gated: Gate = "") -> Tensor:
    """[R, O] of ``dtype``, or [R, O / 2] of halves."""
    whole = product.finished(dtype)
    return _applied(whole, gated) if gated else whole


def _applied(whole: Tensor, gated: Gate) -> Tensor:
    if gated == "relu2":
        return functional.relu(whole).square()
    gate, up = whole.chunk(2, dim=-1)
    opened = functional.gelu(gate, approximate="tanh") if gated == "gelu" else functional.silu(gate)
    return torch.mul(opened, up)


@op(gpu="linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, rounded. Returns [R, O] of x's dtype.

    x: [R, K]. weight: [O, K]. bias: [O]. All of one dtype and contiguous. On a GPU sums are in fp32 and a row has the
    same bits with any number of rows.
    """
    return functional.linear(x, weight, bias)


@op(gpu="linear")
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: Gate = "silu") -> Tensor:
    """``act(gate) * up`` for the two halves of ``x @ weight.T + bias``, gate first, or ``relu(x) ** 2`` of all of it.
    Returns [R, O / 2], or [R, O].

    The product is rounded to x's dtype before, and what comes of a gate is too: the same steps as the product and the
    activation one after the other.
    """
    return _applied(functional.linear(x, weight, bias), gated)
