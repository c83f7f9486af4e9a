"""Rotary position embedding of queries and keys, alone or on the way from the qkv product to the KV store."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging.ops import store_rows
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.linear import Partials
from foresay.verifier.ops.norm import Norm, norm


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate every head by its row's position (half-rotation layout).

    heads: [R, N, D]; cos, signed_sin: [R, 1, D] of the same dtype, the first half of ``signed_sin`` negated.
    With (a, b) the halves of a head: ``(a cos - b sin, b cos + a sin)``.
    """
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return swapped.mul_(signed_sin).addcmul_(heads, cos)


def rotate_and_store(
    qkv: Tensor | Partials,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    count: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Norm the heads where the model does, rotate queries and keys, and store keys and values in their slots.

    qkv: [R, (Q + 2 G) * D], queries, keys, values, a product that may not be finished. cos, signed_sin: [R, 1, D] as
    :func:`rotate` takes them. keys, values: [slots, G, D], one layer of a store, written in place. slots: int64 [R],
    distinct but for padding rows, which all go to slots of page 0. query_norm, key_norm: [D], both or neither. All of
    one dtype and contiguous.
    scales: fp32[slots, 2, G] where keys and values are quantised on the way (:func:`foresay.kvpaging.ops.quantized`),
    of their dtype then. Returns the rotated queries, [R, Q, D], contiguous. count: int64[1], of how many rows, read
    when it runs (of compiled kernels; None: all).
    """
    if cos.is_cuda:
        from foresay.verifier.ops.kernels import rotate as kernels

        return kernels.rotate_and_store(qkv, cos, signed_sin, keys, values, slots, query_norm, key_norm, eps, scales)
    if isinstance(qkv, Partials):
        qkv = qkv.finished(cos.dtype)
    groups, dim = keys.shape[-2:]
    if compiled(qkv):
        from foresay.verifier.ops.kernels.cpu import rows
        from foresay.verifier.ops.kernels.cpu.launch import counted, room

        query = room((len(qkv), qkv.shape[1] // dim - 2 * groups, dim), qkv.dtype)
        norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
        tables, number = (cos, signed_sin), counted(count, len(qkv))
        rows.rotate_and_store(qkv, tables, (keys, values, scales), slots, norms, eps, query, number)
        return query
    heads = qkv.view(len(qkv), -1, dim)
    turning, value = heads[:, :-groups], heads[:, -groups:]
    if query_norm is not None and key_norm is not None:
        query = norm(turning[:, :-groups], Norm(query_norm, eps))
        turning = torch.cat((query, norm(turning[:, -groups:], Norm(key_norm, eps))), dim=1)
    turned = rotate(turning, cos, signed_sin)
    store_rows(keys, values, slots, turned[:, -groups:], value, scales)
    return turned[:, :-groups].contiguous()
