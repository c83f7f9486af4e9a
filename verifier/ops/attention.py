"""Rotary embedding, and attention of many sequences' rows over their pages, from static tensors.

The whole batch is one call, lengths, page tables and trees are only read from tensors, and a row's bits depend only on
its own path (docs/same-tokens.md, docs/kernels.md).

Legend: S sequences, R rows, H query heads, G kv heads, D head dim, P pages of a table.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from foresay.kvpaging.store import LARGEST, dequantized, store_rows
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import as_read, as_stored, empty, launch, on_triton, row_of
from foresay.verifier.ops.records import (
    AttentionMetadata,
    AttentionPlan,
    FusedRope,
    Norm,
    QKNorms,
    Rotation,
    SplitKSums,
)
from foresay.verifier.ops.rows import norm

#: Of a GPU, read when a step is laid out: whether the slots of tails are looked up once a step, and whether attention
#: rotates queries and keys where it can. Neither changes a bit.
SLOTS_ONCE, ROTATED_WITHIN = False, False


def plan_attention(paged: AttentionMetadata, rows: int, count: Tensor | None = None) -> AttentionPlan:
    """What CPU kernels need to know of positions, slots and work, computed once per pass. rows: R. count: int64[1], the
    actual number; None: all."""
    from foresay.verifier.ops.kernels.cpu import work_items
    from foresay.verifier.ops.kernels.cpu.launch import counted

    if paged.plan is None:
        paged.plan = work_items.plan_attention(paged, rows, counted(count, rows))
    return paged.plan


@op(gpu="tree_attention", cpu="attention")
def tree_attention(
    query: Tensor | FusedRope,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    window: int | None = None,
    first: int = 0,
    count: Tensor | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: int = 0,
) -> Tensor:
    """Attention of every row over the committed tokens of its sequence and its own path. Returns [R, H, D] like query.

    query: [R, H, D], contiguous. keys, values: [slots, G, D], one layer of a store, the rows' own stored beforehand,
    unless the query is unrotated: then this is done here; the rows are whole trees, and these are not quantised.
    shared: values are this many numbers of each key, from the first, and ``values`` is not read: [R, H, shared] is
    returned; 0: they are not.
    window: how many positions a row attends to, including its own; None: all. first: positions below are not attended
    to. A row that attends to nothing, and a padding row, gives zeros. count: int64[1], the number of rows, read when it
    runs (by compiled kernels; None: all). scales: fp32[slots, 2, G] of quantised keys and values, which may be rounded
    to the query's dtype when they are read. softcap: a scaled score s becomes ``softcap * tanh(s / softcap)`` (Gemma
    2); None: no cap. sinks: fp32[H], one more logit for each query head, which takes part in the softmax and has no
    value (gpt-oss); None: none.
    """
    query = rotated(query, (keys, values, scales))
    values = keys[..., :shared] if shared else values
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    for sequence, (begin, end) in enumerate(pairwise(rows.offsets.tolist())):
        for row in range(begin, end):
            seen = _visible(rows, sequence, row - begin, row)
            seen = seen[max(first, len(seen) - window if window else 0) :]
            slots = rows.tables[sequence, seen // rows.page_size].long() * rows.page_size + seen % rows.page_size
            k, v = keys[slots], values[slots]
            if scales is not None:
                k, v = dequantized(k, scales[slots, 0]), dequantized(v, scales[slots, 1])
            out[row] = _softmax_attention(query[row], k, v, scale, softcap, sinks)
    return out


def rotated(query: Tensor | FusedRope, layer: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    """The queries; what is not stored yet is."""
    return query if isinstance(query, Tensor) else rotate_and_store(query.product, query.rotation, layer, query.slots)


@op(gpu="tree_attention")
def tail_slots(rows: AttentionMetadata) -> Tensor:
    """int32[R, 2, 64]: for rows with words, the slots of the keys that each attends to in the blocks of 64 positions
    that touch uncommitted ones, in order of position; 0 elsewhere."""
    assert rows.words is not None, "rows of trees"
    out = rows.tables.new_zeros(len(rows.words), 128)
    for sequence, (begin, end) in enumerate(pairwise(rows.offsets.tolist())):
        for row in range(begin, end):
            seen = _visible(rows, sequence, row - begin, row)[int(rows.lengths[sequence]) // 64 * 64 :]
            pages = rows.tables[sequence, seen // rows.page_size]
            out[row, : len(seen)] = pages * rows.page_size + seen % rows.page_size
    return out.view(-1, 2, 64)


def _visible(rows: AttentionMetadata, sequence: int, order: int, row: int) -> Tensor:
    """int64[N]: the slots of the keys that a row may attend to, in order of position."""
    length = int(rows.lengths[sequence])
    if rows.words is None or (rows.is_prefill is not None and int(rows.is_prefill[sequence])):
        return torch.arange(length + order + 1)
    word = int(rows.words[row])
    return torch.tensor([*range(length), *(length + node for node in range(64) if word >> node & 1)])


def _softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[H, D]: the attention of one row, whose keys and values are [N, G, D]; sums in fp32."""
    heads, width = query.shape
    if not len(keys):
        return query.new_zeros(heads, values.shape[-1])
    stacked = query.float().view(keys.shape[1], -1, width)
    scores = stacked @ keys.float().permute(1, 2, 0) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(*scores.shape[:2], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return (weights @ values.float().transpose(0, 1)).view(heads, -1).to(query.dtype)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate every head by its row's position (half-rotation layout).

    heads: [R, N, D]; cos, signed_sin: [R, 1, D] of the same dtype, the first half of ``signed_sin`` negated.
    With (a, b) the halves of a head: ``(a cos - b sin, b cos + a sin)``.
    """
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return swapped.mul_(signed_sin).addcmul_(heads, cos)


@op()
def rotate_and_store(
    qkv: Tensor | SplitKSums,
    rotation: Rotation,
    layer: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    norms: QKNorms | None = None,
    count: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Normalise the heads if the model does, rotate queries and keys, and store keys and values in their slots.

    qkv: [R, (Q + 2 G) * D], queries, keys, values, a possibly unfinished product; alike: [R, (Q + G) * D], where values
    are the keys, before these are normalised and rotated. layer: one layer of a store, its
    keys, values and scales: [slots, G, D] twice, written in place, and None; or fp32[slots, 2, G] if keys and values
    are quantised here (:func:`foresay.kvpaging.store.quantized`), and have the quantised dtype. slots: int64[R],
    distinct except for padding rows, which all go to slots of page 0. All else has one dtype and is contiguous. Returns
    the rotated queries, [R, Q, D], contiguous. count: int64[1], the number of rows, read when it runs (by compiled
    kernels; None: all).
    """
    cos, signed_sin, factor = rotation
    if isinstance(qkv, SplitKSums):
        qkv = qkv.reduce(cos.dtype)
    groups, dim = layer[0].shape[-2:]
    heads = qkv.view(len(qkv), -1, dim)
    turning, value = heads if alike else heads[:, :-groups], heads[:, -groups:]
    if norms is not None and norms.values:
        value = norm(value, Norm(value.new_ones(dim), norms.eps))
    if norms is not None and not norms.after:
        turning = _normed(turning, groups, norms)
    turned = rotate(turning, cos, signed_sin)
    if norms is not None and norms.after:
        turned = _normed(turned, groups, norms)
    keys, values, scales = layer
    store_rows(keys, values, slots, turned[:, -groups:], value, scales)
    query = turned[:, :-groups]
    return query.contiguous() if factor is None else query * factor[:, None, None]


@op()
def rotate_queries(
    product: Tensor | SplitKSums, rotation: Rotation, norms: QKNorms | None = None, count: Tensor | None = None
) -> Tensor:
    """As :func:`rotate_and_store`, of rows that have only queries. product: [R, Q * D]."""
    cos, signed_sin, factor = rotation
    if isinstance(product, SplitKSums):
        product = product.reduce(cos.dtype)
    query = product.view(len(product), -1, cos.shape[-1])
    if norms is not None and not norms.after:
        query = _normed_queries(query, norms)
    query = rotate(query, cos, signed_sin)
    if norms is not None and norms.after:
        query = _normed_queries(query, norms)
    return query if factor is None else query * factor[:, None, None]


def _normed_queries(query: Tensor, norms: QKNorms) -> Tensor:
    normed = norm(query.flatten(1) if norms.whole else query, Norm(norms.query, norms.eps))
    return normed.view_as(query)


def _normed(heads: Tensor, groups: int, norms: QKNorms) -> Tensor:
    """Normalise heads of queries, followed by ``groups`` keys, [R, Q + G, D]."""
    query, key = heads[:, :-groups], heads[:, -groups:]
    if norms.whole:
        query, key = query.flatten(1), key.flatten(1)
    normed = norm(query, Norm(norms.query, norms.eps)), norm(key, Norm(norms.key, norms.eps))
    return torch.cat(normed, dim=1).view_as(heads)


@op()
def join_latents(
    plain: Tensor, turning: Tensor, rotation: Rotation, out: Tensor, slots: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write each head as its two parts, the second one rotated; returns ``out``.

    plain: [R, N * C]. turning: [R, N * P]. out: [.., N, C + P]; slots: int64[R], where there each row goes, as in
    :func:`rotate_and_store`; None: it is [R, N, C + P]. All of one dtype and contiguous. count: see there.
    """
    heads = out.shape[-2]
    wide, turned = plain.view(len(plain), heads, -1), turning.view(len(plain), heads, -1)
    joined = torch.cat((wide, rotate(turned, rotation.cos, rotation.signed_sin)), dim=-1)
    return out.copy_(joined) if slots is None else out.index_copy_(0, slots, joined)


@join_latents.kernel
def _join_latents(
    plain: Tensor, turning: Tensor, rotation: Rotation, out: Tensor, slots: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    heads, half = out.shape[-2], rotation.cos.shape[-1] // 2
    width = out.shape[-1] - 2 * half
    launch(
        "rows.join_latent_rows", (len(plain), heads),
        (plain, turning, rotation.cos, rotation.signed_sin, out, plain if slots is None else slots),
        {"HEADS": heads, "WIDTH": width, "HALF": half, "BLOCK": row_of(plain, max(width, half))["BLOCK"],
         "PLACED": slots is not None},
        count, rows=True,
    )  # fmt: skip
    return out


@rotate_and_store.kernel
def _rotate_and_store(
    qkv: Tensor | SplitKSums,
    rotation: Rotation,
    layer: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    norms: QKNorms | None = None,
    count: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    return _rotate(qkv, rotation, norms, count, layer, slots, alike)


@rotate_queries.kernel
def _rotate_queries(
    product: Tensor | SplitKSums, rotation: Rotation, norms: QKNorms | None = None, count: Tensor | None = None
) -> Tensor:
    return _rotate(product, rotation, norms, count)


def _rotate(
    qkv: Tensor | SplitKSums,
    rotation: Rotation,
    norms: QKNorms | None,
    count: Tensor | None,
    layer: tuple[Tensor, Tensor, Tensor | None] | None = None,
    slots: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Launches the kernel. layer, slots: None where there are only queries."""
    (product, bias), apart, about = as_read(qkv)
    cos, signed_sin, factor = rotation
    keys, values, scales = layer or (product, product, None)
    groups, dim = (0, cos.shape[-1]) if layer is None else keys.shape[-2:]
    rows, heads = product.shape[-2], product.shape[-1] // dim
    together = 8 if on_triton(product) else 1
    if norms is not None and norms.whole and not on_triton(product):
        together = heads  # so that their statistics are computed once
    heads += groups if alike else 0
    query = empty((rows, heads - 2 * groups, dim), cos)
    read = (product, bias, cos, signed_sin, product if factor is None else factor)
    weights = (product, product) if norms is None else (norms.query, norms.key)
    stored = *as_stored(keys, values, scales), product if slots is None else slots
    launch(
        "rows.rotate_and_store_rows", (rows, -(-heads // together)),
        (*read, *weights, query, *stored, apart, 0.0 if norms is None else norms.eps),
        {
            "QUERIES": heads - 2 * groups, "GROUPS": groups, "DIM": dim, "HALF": dim // 2, "HEADS": together,
            "BLOCK": row_of(product, dim // 2)["BLOCK"], "NORM": norms is not None,
            "WHOLE": norms is not None and norms.whole, "AFTER": norms is not None and norms.after,
            "FACTOR": factor is not None, "LARGEST": 0.0 if scales is None else LARGEST[keys.dtype],
            "ALIKE": alike, "VALUED": norms is not None and norms.values,
        } | about,
        count, rows=True,
    )  # fmt: skip
    return query
