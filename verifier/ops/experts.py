"""Mixtures of experts: which rows go to which expert, and the weighted sum of a row's experts.

::

    logits ── route ── experts of each row, in the order of their numbers, with their weights
    rows ──── sort_rows ── copies, grouped by expert ── expert_linear, twice ── mixed: a row's sum

A GPU copies no rows. A row's experts depend only on its own logits, each computes an fp32 vector, and these are added
up in the order of the experts' numbers, the shared expert's last. So a row has the same bits in any batch.

Legend: R rows, E experts, k of them chosen for a row, P places of copies, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.eager import compiled, op
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.launch import empty, launch, on_triton, padded
from foresay.verifier.ops.linear import PackedWeight, finish
from foresay.verifier.ops.records import TILE, ExpertRows, Routing, SplitKSums, gate_parts

#: Columns of a row that are added up by a program.
_COLUMNS = 256


def places_of(rows: int, how: Routing) -> int:
    """P: places for the copies of ``rows`` rows."""
    return rows * how.top_k + min(how.experts, rows * how.top_k) * (TILE - 1)


@op()
def route(
    logits: Tensor,
    how: Routing,
    correction: Tensor | None = None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each row, int32[R, k], in the order of their numbers, and their weights, fp32[R, k].

    logits: fp32[R, E or more], those of experts first. correction: fp32[E]. count: int64[1], the number of rows, read
    when it runs (by compiled kernels; None: all). Of equal scores the one with the lowest number is chosen. slots:
    int64[R], of each row's key; 0: it is padding, whose experts are -1 on a GPU (None: no row is). factors: fp32[E],
    of the weights of each expert, applied last.
    """
    own = logits[:, : how.experts]
    scores = own.sigmoid() if how.sigmoid else own.softmax(1)
    ranked = own if not how.sigmoid else scores if correction is None else scores + correction
    groups, best = how.groups
    if groups > 1:
        whole = ranked.unflatten(1, (groups, -1))
        kept = whole.topk(1 + how.sigmoid, 2).values.sum(2).sort(dim=1, descending=True, stable=True).indices[:, :best]
        aside = torch.ones(len(own), groups, dtype=torch.bool).scatter_(1, kept, False)
        ranked = whole.masked_fill(aside.unsqueeze(2), -torch.inf).flatten(1)
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : how.top_k].sort(1).values
    weights = scores.gather(1, chosen)
    if how.norm_topk:
        weights = weights / (weights.sum(1, keepdim=True) + (1e-20 if how.sigmoid else 0.0))
    weights = weights * how.scale if factors is None else weights * how.scale * factors[chosen]
    chosen = chosen if slots is None else chosen.masked_fill((slots == 0).unsqueeze(1), -1)
    return chosen.int(), weights


@route.kernel
def _route(
    logits: Tensor,
    how: Routing,
    correction: Tensor | None = None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (rows, width), (groups, best), on_gpu = logits.shape, how.groups, on_triton(logits)
    chosen, weights = empty((rows, how.top_k), logits, torch.int32), empty((rows, how.top_k), logits)
    given = (logits if one is None else one for one in (correction, slots if on_gpu else None, factors))
    sizes = groups, how.experts // groups
    launch(
        "experts.route_rows", (rows,), (logits, *given, chosen, weights, how.scale),
        {"WIDTH": width, "EXPERTS": how.experts, "CHOSEN": how.top_k, "SIGMOID": how.sigmoid,
         "CORRECTED": correction is not None, "NORMALISED": how.norm_topk, "PADDED": on_gpu and slots is not None,
         "WEIGHTED": factors is not None, "GROUPS": groups, "BEST": best}
        | dict(zip(("ROWS", "BLOCK"), map(padded, sizes) if on_gpu else sizes, strict=True)),
        count, rows=True, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return chosen, weights


@op(gpu="experts", cpu="experts")
def sort_rows(x: Tensor, chosen: Tensor, how: Routing, count: Tensor | None = None) -> tuple[Tensor, ExpertRows]:
    """The rows, and their places by expert, in the order of the rows; a CPU copies the rows there, [P, K], perhaps with
    gaps between two experts.

    x: [R, K]. chosen: int32[R, k]. count: see :func:`route`.
    """
    pairs, (tiles, height) = chosen[: len(x) if count is None else int(count)].flatten(), how.tiles(chosen)
    order, owners = chosen.new_full((tiles, height), chosen.numel()), chosen.new_full((tiles,), -1)
    woken, at = pairs[pairs >= 0].unique().tolist(), 0
    for expert in woken:
        for part in (pairs == expert).nonzero().flatten().split(height):
            order[at, : len(part)], owners[at], at = part.int(), expert, at + 1
    places = torch.arange(chosen.numel(), dtype=torch.int32).view_as(chosen).masked_fill(chosen < 0, -1)
    return x, ExpertRows(places, torch.tensor([len(woken)]), order, owners)


def expert_linear(x: Tensor, weight: PackedWeight | BlockedWeight, dtype: torch.dtype, rows: ExpertRows) -> Tensor:
    """Each place's row times the weight of its expert, [P, O] (or [P, O / 2] of halves): it has the bits that
    :func:`~foresay.verifier.ops.linear.packed_linear` gives it with only that expert's weight.

    x: [P, K]; or, where rows are not copied, [R, K]. weight: [E * O, K], of all experts; with gate and up, all gates
    first. rows: the experts' places. The gaps between two experts' rows are undefined.
    """
    if isinstance(weight, BlockedWeight):
        if x.is_cuda:
            from foresay.verifier.ops.kernels import experts as kernels

            return kernels.expert_linear(x, weight, dtype, rows)
    elif compiled(x):
        return weight.product(x, dtype, rows.spans)
    assert rows.sorted_ids is not None and rows.expert_ids is not None, "they were sorted by the reference"
    pairs = rows.positions.numel()
    expert = x.new_zeros(pairs + 1, dtype=torch.int64)
    expert[rows.sorted_ids.long()] = rows.expert_ids.clamp_min(0).long().unsqueeze(1).expand_as(rows.sorted_ids)
    row = torch.arange(pairs) // (pairs // len(x))
    whole = _of_all(x, weight).unflatten(1, (gate_parts(weight.gated), weight.experts, -1))
    sums = whole[row, :, expert[:pairs]].flatten(1)
    return finish(SplitKSums(sums.unsqueeze(0), None), dtype, weight.gated)


def _of_all(x: Tensor, weight: PackedWeight | BlockedWeight) -> Tensor:
    """fp32[R, E * O]."""
    if (whole := weight.rounded(x)) is not None:
        return whole
    bias, sums = weight.plain_bias(), x.float() @ weight.plain().to(x.dtype).float().T
    return sums if bias is None else sums + bias


@op()
def mixed(
    parts: Tensor,
    weights: Tensor,
    places: Tensor,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """[R, H] of ``dtype``: the outputs of a row's experts, times their weights, added up in order; then the shared
    expert's. All in fp32, and rounded once.

    parts: fp32[P, H]. weights: fp32[R, k]. places: int32[R, k]. shared: fp32[R, H]. gate: fp32[R, N], the sigmoid of
    its last column multiplies the shared output. count: see :func:`route`.
    """
    total = parts.new_zeros(len(places), parts.shape[1])
    for weight, place in zip(weights.unbind(1), places.unbind(1), strict=True):
        total = torch.addcmul(total, weight.unsqueeze(1), parts[place.long().clamp(0, len(parts) - 1)])
    if shared is not None:
        total = total + (shared if gate is None else shared * gate[:, -1:].sigmoid())
    return total.to(dtype)


@mixed.kernel
def _mixed(
    parts: Tensor,
    weights: Tensor,
    places: Tensor,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    (rows, each), width = places.shape, parts.shape[1]
    out, others = empty((rows, width), parts, dtype), (parts if one is None else one for one in (shared, gate))
    constants = {"WIDTH": width, "CHOSEN": each, "SHARED": shared is not None, "PADDED": on_triton(parts)}
    launch(
        "experts.mix_rows", (rows, -(-width // _COLUMNS)), (parts, weights, places, *others, out),
        constants | {"GATES": 0 if gate is None else gate.shape[1], "BLOCK": _COLUMNS}, count, rows=True, num_warps=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
