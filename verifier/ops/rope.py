"""Rotary position embedding of queries and keys, alone or on the way from the qkv product to the KV store."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging.store import LARGEST, store_rows
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import as_read, as_stored, launch, new, on_triton, row_of
from foresay.verifier.ops.records import HeadNorms, Norm, Partials, Rotation
from foresay.verifier.ops.rows import norm


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
    qkv: Tensor | Partials,
    rotation: Rotation,
    layer: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    norms: HeadNorms | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Norm the heads where the model does, rotate queries and keys, and store keys and values in their slots.

    qkv: [R, (Q + 2 G) * D], queries, keys, values, a product that may not be finished. layer: one layer of a store, its
    keys, values and scales: [slots, G, D] twice, written in place, and None; or fp32[slots, 2, G] where keys and values
    are quantised on the way (:func:`foresay.kvpaging.store.quantized`), and are of the quantised dtype. slots:
    int64[R], distinct but for padding rows, which all go to slots of page 0. All else is of one dtype and contiguous.
    Returns the rotated queries, [R, Q, D], contiguous. count: int64[1], of how many rows, read when it runs (of
    compiled kernels; None: all).
    """
    cos, signed_sin, factor = rotation
    if isinstance(qkv, Partials):
        qkv = qkv.finished(cos.dtype)
    groups, dim = layer[0].shape[-2:]
    heads = qkv.view(len(qkv), -1, dim)
    turning, value = heads[:, :-groups], heads[:, -groups:]
    if norms is not None and not norms.after:
        turning = _normed(turning, groups, norms)
    turned = rotate(turning, cos, signed_sin)
    if norms is not None and norms.after:
        turned = _normed(turned, groups, norms)
    keys, values, scales = layer
    store_rows(keys, values, slots, turned[:, -groups:], value, scales)
    query = turned[:, :-groups]
    return query.contiguous() if factor is None else query * factor[:, None, None]


def _normed(heads: Tensor, groups: int, norms: HeadNorms) -> Tensor:
    """Heads of queries, and then of ``groups`` keys, [R, Q + G, D]."""
    query, key = heads[:, :-groups], heads[:, -groups:]
    if norms.whole:
        query, key = query.flatten(1), key.flatten(1)
    normed = norm(query, Norm(norms.query, norms.eps)), norm(key, Norm(norms.key, norms.eps))
    return torch.cat(normed, dim=1).view_as(heads)


@rotate_and_store.kernel
def _rotate_and_store(
    qkv: Tensor | Partials,
    rotation: Rotation,
    layer: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    norms: HeadNorms | None = None,
    count: Tensor | None = None,
) -> Tensor:
    (cos, signed_sin, factor), (keys, values, scales) = rotation, layer
    (product, bias), about = as_read(qkv)
    groups, dim = keys.shape[-2:]
    rows, heads = product.shape[-2], product.shape[-1] // dim
    together = 8 if on_triton(product) else 1
    if norms is not None and norms.whole and not on_triton(product):
        together = heads  # their statistics are found once
    query = new((rows, heads - 2 * groups, dim), cos)
    read = (product, bias, cos, signed_sin, product if factor is None else factor)
    weights = (product, product) if norms is None else (norms.query, norms.key)
    launch(
        "rotate.rotate_and_store_rows", (rows, -(-heads // together)),
        (*read, *weights, query, *as_stored(keys, values, scales), slots, rows, 0.0 if norms is None else norms.eps),
        {
            "QUERIES": heads - 2 * groups, "GROUPS": groups, "DIM": dim, "HALF": dim // 2, "HEADS": together,
            "BLOCK": row_of(product, dim // 2)["BLOCK"], "NORM": norms is not None,
            "WHOLE": norms is not None and norms.whole, "AFTER": norms is not None and norms.after,
            "FACTOR": factor is not None, "LARGEST": 0.0 if scales is None else LARGEST[keys.dtype],
        } | about,
        count, rows=True,
    )  # fmt: skip
    return query
