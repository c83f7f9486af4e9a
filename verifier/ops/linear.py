"""Products of rows with a large weight, and what is done to them before they are stored.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled

#: What is done to a product: nothing; ``act(gate) * up`` of its halves, act being ``x * sigmoid(x)`` or GELU as tanh
#: approximates it; or, of all of it, ``relu(x) ** 2``.
Gate = Literal["", "silu", "gelu", "relu2"]


def turns_of(gated: Gate) -> int:
    """How many outputs of a product become one number: two where one is the other's gate."""
    return 2 if gated in ("silu", "gelu") else 1


@dataclass(frozen=True, slots=True)
class Partials:
    """A product [R, O] whose segments are still to be added: in order, then the bias; then it is rounded.

    sums: fp32[segments, R, O]. bias: [O] or None.
    """

    sums: Tensor
    bias: Tensor | None

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[R, O]."""
        total = self.sums[0]
        for segment in self.sums[1:]:
            total = total + segment
        return (total if self.bias is None else total + self.bias.float()).to(dtype)


class PackedWeight(Protocol):
    """A weight [O, K] with its bias, laid out for its device: everything that :func:`packed_linear` asks of one.

    gated: what is done to the product.
    """

    @property
    def on_gpu(self) -> bool:
        """Whether kernels of a GPU multiply it."""

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
        """As :func:`unfinished_linear`, by the kernels of its device."""

    def segments(self) -> list[slice]:
        """The parts of K that a GPU sums up apart; of a CPU's weight all of it."""


def packed_linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype, count: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of a packed weight, and what is done to it (:data:`Gate`).

    x: [R, K], contiguous. Returns [R, O], or [R, O / 2] of halves, rounded to ``dtype``. Sums are in fp32, and a row
    has the same bits with any number of rows. count: int64[1], of how many rows, read when it runs (of a CPU's kernels;
    None: all).
    """
    made = unfinished_linear(x, weight, dtype, count)
    return made if isinstance(made, Tensor) else finish(made, dtype, weight.gated)


def unfinished_linear(
    x: Tensor, weight: PackedWeight, dtype: torch.dtype, count: Tensor | None = None
) -> Tensor | Partials:
    """The same, but that a GPU leaves the sums of several segments, and the gate with them, to whoever reads it."""
    if x.is_cuda or (not weight.on_gpu and compiled(x)):
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


def finish(product: Partials, dtype: torch.dtype, gated: Gate = "") -> Tensor:
    """[R, O] of ``dtype``, or [R, O / 2] of halves."""
    if product.sums.is_cuda:
        from foresay.verifier.ops.kernels import segments

        return segments.finish(product, dtype, gated)
    whole = product.finished(dtype)
    return _applied(whole, gated) if gated else whole


def _applied(whole: Tensor, gated: Gate) -> Tensor:
    if gated == "relu2":
        return functional.relu(whole).square()
    gate, up = whole.chunk(2, dim=-1)
    opened = functional.gelu(gate, approximate="tanh") if gated == "gelu" else functional.silu(gate)
    return torch.mul(opened, up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, rounded. Returns [R, O] of x's dtype.

    x: [R, K]. weight: [O, K]. bias: [O]. All of one dtype and contiguous. On a GPU sums are in fp32 and a row has the
    same bits with any number of rows.
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: Gate = "silu") -> Tensor:
    """``act(gate) * up`` for the two halves of ``x @ weight.T + bias``, gate first, or ``relu(x) ** 2`` of all of it.
    Returns [R, O / 2], or [R, O].

    The product is rounded to x's dtype before, and what comes of a gate is too: the same steps as the product and the
    activation one after the other.
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import linear as kernels

        return kernels.gated_linear(x, weight, bias, gated)
    return _applied(functional.linear(x, weight, bias), gated)
