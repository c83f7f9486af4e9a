"""Products of whole numbers: activations are rounded to 8 bits as they are multiplied with few bits of weights.

::

    numbers    int8[R, K]        x times 127 / (the largest size in its group of 32), to the nearest, ties to even
    scales     fp32[R, K / 32]   that size / 127; not a number where an input of the group is none
    a sum      for each piece of k, in order: (the whole-number sum of its terms) * scale of the inputs, then
               sum = fma(that, scale of the weights, sum). Zeros and minimums are taken away by the piece's sum of
               inputs, times the scale of these

Whole numbers have one sum whatever the order, so every processor has the same, and rows do not see each other. A piece
is what has one scale on both sides: 32 numbers, or fewer where weights have smaller groups.

Legend: R rows, K inner width, O outer width, P numbers of a piece, N = K / P pieces.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from foresay.verifier.ops.quantized import QuantizedMatrix

#: Numbers of a row that are rounded with one scale.
GROUP = 32
#: What a group has to reach to be more than zeros: below it 127 / size is no number any more.
LEAST = 2.0**-100


def piece_of(group: int) -> int:
    """P. group: numbers of a row of weights that have a scale together."""
    return gcd(group, GROUP)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of rows [R, K], see above."""
    grouped = x.float().unflatten(1, (-1, GROUP))
    size = grouped.abs().amax(2)
    most = torch.full_like(size, 127.0)
    factor = torch.where((size >= LEAST) & size.isfinite(), most / size, 0.0)
    numbers = (grouped * factor.unsqueeze(2)).nan_to_num_(0.0).round_().to(torch.int8).flatten(1)
    return numbers, torch.where(size.isinf(), torch.nan, size / most)


def rounded_product(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """fp32[R, O]: rows [R, K] times a weight of whole numbers, and the bias, as above."""
    numbers, scales = rounded(x)
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
