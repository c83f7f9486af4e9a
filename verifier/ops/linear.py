"""Products of rows with a large weight, and their activations.

Integer products: activations are rounded to 8 bits when they are multiplied with quantised weights::

    numbers    int8[R, K]        x times 127 / (the largest size in its group of 32), to the nearest, ties to even
    scales     fp32[R, K / 32]   that size / 127; not a number where an input of the group is none
    a sum      for each piece of k, in order: (the whole-number sum of its terms) * scale of the inputs, then
               sum = fma(that, scale of the weights, sum). Zeros and minimums are taken away by the piece's sum of
               inputs, times the scale of these

Integer sums do not depend on the order, so every processor gets the same, and rows are independent. A piece has one
scale on both sides: 32 numbers, or fewer if weights have smaller groups.

Legend: R rows, K inner width, O outer width, P numbers of a piece, N = K / P pieces.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled, op
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.quant_groups import GROUP, LEAST, piece_of
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import Gate, SplitKSums


class PackedWeight(Protocol):
    """A weight [O, K] with its bias, laid out for a CPU: the interface that :func:`packed_linear` needs. A GPU's is
    a :class:`~foresay.verifier.ops.kernels.blocked.BlockedWeight`.

    gated: the activation of the product. experts: how many experts' weights are stacked (0: it is a single one), for
    :func:`~foresay.verifier.ops.experts.expert_linear`.
    """

    @property
    def experts(self) -> int:
        """How many experts' weights are stacked."""

    @property
    def outer(self) -> int:
        """O."""

    @property
    def inner(self) -> int:
        """K."""

    @property
    def gated(self) -> Gate:
        """The activation of the product."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads, without the bias."""

    @property
    def rows_apart(self) -> bool:
        """Whether rows of this layout can be taken and replaced."""

    def select_rows(self, rows: Tensor) -> Self:
        """Only these rows, int64[N], copied; of a weight without gate, bias and experts."""

    def replace(self, rows: Tensor, other: Self, numbers: Tensor) -> None:
        """Make these rows, int64[N], those with these numbers of another weight with the same layout, in place."""

    def plain(self) -> Tensor:
        """[O, K]: the dequantised weight."""

    def rounded(self, x: Tensor) -> Tensor | None:
        """fp32[R, O]: the product with rows [R, K], including the bias, if it rounds them; None if it does not."""

    def plain_bias(self) -> Tensor | None:
        """[O]: the bias as it was."""

    def product(self, x: Tensor, dtype: torch.dtype, count: Tensor | None, heads: int = 0) -> Tensor:
        """As :func:`split_k_linear`, by compiled kernels; or as :func:`head_linear`, with so many heads."""


def packed_linear(
    x: Tensor, weight: PackedWeight | BlockedWeight, dtype: torch.dtype, count: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight, and its activation (:data:`~foresay.verifier.ops.records.Gate`).

    x: [R, K], contiguous. Returns [R, O], or [R, O / 2] of halves, rounded to ``dtype``. Sums are in fp32, and a row
    has the same bits with any number of rows. count: int64[1], the number of rows, read when it runs (by CPU kernels;
    None: all).
    """
    made = split_k_linear(x, weight, dtype, count, finished=True)
    return made if isinstance(made, Tensor) else finish(made, dtype, weight.gated)


def head_linear(
    x: Tensor, weight: PackedWeight | BlockedWeight, dtype: torch.dtype, count: Tensor | None = None
) -> Tensor:
    """A product of each head: [R, heads * O] of [R, heads * K], with a weight [heads * O, K] that is stacked like that
    of experts, and has no bias. A row has the same bits with any number of rows."""
    heads = x.shape[1] // weight.inner
    if isinstance(weight, BlockedWeight):
        if x.is_cuda:
            from foresay.verifier.ops.kernels import linear as kernels

            return kernels.head_product(x, weight, dtype)
    elif compiled(x):
        return weight.product(x, dtype, count, heads)
    own = weight.plain().to(x.dtype).unflatten(0, (heads, -1))
    return torch.einsum("rhk,hok->rho", x.unflatten(1, (heads, -1)), own).flatten(1).to(dtype)


def split_k_linear(
    x: Tensor,
    weight: PackedWeight | BlockedWeight,
    dtype: torch.dtype,
    count: Tensor | None = None,
    finished: bool = False,
) -> Tensor | SplitKSums:
    """The same, except that a GPU leaves adding several segments, and then the gate too, to the next op. finished:
    only where it has to."""
    if isinstance(weight, BlockedWeight):
        if x.is_cuda:
            from foresay.verifier.ops.kernels import linear as kernels

            return kernels.product(x, weight, dtype, finished)
    elif compiled(x):
        return weight.product(x, dtype, count)
    if (whole := weight.rounded(x)) is not None:
        return finish(SplitKSums(whole.unsqueeze(0), None), dtype, weight.gated)
    bias, plain = weight.plain_bias(), weight.plain().to(x.dtype)
    if isinstance(weight, BlockedWeight) and len(segments := weight.segments()) > 1:
        sums = [functional.linear(x[:, part].float(), plain[:, part].float()) for part in segments]
        return SplitKSums(torch.stack(sums), bias)
    whole_bias = None if bias is None else bias.to(x.dtype)
    if weight.gated:
        return gated_linear(x, plain, whole_bias, weight.gated).to(dtype)
    return linear(x, plain, whole_bias).to(dtype)


@op(gpu="linear")
def finish(product: SplitKSums, dtype: torch.dtype, gated: Gate = "") -> Tensor:
    """[R, O] of ``dtype``, or [R, O / 2] of halves."""
    whole = product.reduce(dtype)
    return _applied(whole, gated) if gated else whole


def _applied(whole: Tensor, gated: Gate) -> Tensor:
    if gated == "relu2":
        return functional.relu(whole).square()
    gate, up = whole.chunk(2, dim=-1)
    if gated == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1.0) * (gate * torch.sigmoid(gate * 1.702))
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

    The product is rounded to x's dtype first, and so is the activated gate: the same steps as a separate product and
    activation.
    """
    return _applied(functional.linear(x, weight, bias), gated)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of rows [R, K], see above."""
    grouped = x.float().unflatten(1, (-1, GROUP))
    size = grouped.abs().amax(2)
    most = torch.full_like(size, 127.0)
    factor = torch.where((size >= LEAST) & size.isfinite(), most / size, 0.0)
    numbers = (grouped * factor.unsqueeze(2)).nan_to_num_(0.0).round_().to(torch.int8).flatten(1)
    return numbers, torch.where(size.isinf(), torch.nan, size / most)


def rounded_product(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """fp32[R, O]: rows [R, K] times an integer weight, plus the bias, as above."""
    numbers, scales = rounded(x)
    weight = weight.whole()
    piece, groups, spans = piece_of(weight.group), weight.scales.shape[1], weight.inner // weight.span
    values, sums = (each.unflatten(1, (-1, piece)).double() for each in (weight.numbers(), numbers))
    total = torch.zeros(len(x), len(values)) if bias is None else bias.float().expand(len(x), -1)
    for at in range(weight.inner // piece):
        group, span = at * groups // values.shape[1], at * spans // values.shape[1]
        scale = scales[:, at * piece // GROUP, None]
        value = (sums[:, at] @ values[:, at].T).float() * scale
        inputs = sums[:, at].sum(1, keepdim=True).float() * -scale
        if weight.zeros is not None:
            value = fma(inputs, weight.zeros[:, group].float(), value)
        total = fma(value, _stepped(weight.scales, weight.steps, group, span), total)
        if weight.minimums is not None:
            total = fma(inputs, _stepped(weight.minimums, weight.minimum_steps, group, span), total)
    return total


def _stepped(multiples: Tensor, steps: Tensor | None, group: int, span: int) -> Tensor:
    """fp32[O]: scales or minimums of a group."""
    found = multiples[:, group].float()
    return found if steps is None else found * steps[:, span].float()


def fma(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """``first * second + third`` of fp32, rounded once: the sum in fp64 keeps in its last bit that it is not exact."""
    product, other = first.double() * second.double(), third.double()
    total = product + other
    before = total - product
    rest = (product - (total - before)) + (other - before)
    even = total.view(torch.int64) & 1 == 0
    towards = torch.nextafter(total, torch.copysign(torch.full_like(rest, torch.inf), rest))
    return torch.where((rest != 0) & even & rest.isfinite(), towards, total).float()
