"""From the rows of the qkv product to rotated queries and stored keys and values, in one launch.

A program takes one row and a few of its heads, queries, keys and values alike; a head is held as its two halves, which
is what the rotation mixes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.kvpaging.ops import LARGEST
from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.norm import inverse_rms, weighted
from foresay.verifier.ops.kernels.quantized_rows import as_stored, narrowed, scale_of
from foresay.verifier.ops.kernels.segments import ROWS, as_read, product_at
from foresay.verifier.ops.linear import Partials

_HEADS = 8


@triton.jit(do_not_specialize=ROWS)
def rotate_and_store_rows(
    qkv,
    bias,
    cos,
    signed_sin,
    query_weight,
    key_weight,
    queries,
    keys,
    values,
    scales,
    slots,
    R,
    eps,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The heads of one row, HEADS of them a program; HALF of a head in BLOCK columns. LARGEST: number of the type that
    keys and values are quantised to; 0: of none."""
    wait_turn(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (heads < QUERIES + 2 * GROUPS) & (columns < HALF)
    kind: tl.constexpr = queries.dtype.element_ty
    width: tl.constexpr = (QUERIES + 2 * GROUPS) * DIM
    at = heads * DIM + columns
    low = product_at(qkv, bias, row, at, inside, R, kind, width, SEGMENTS, BIAS)
    high = product_at(qkv, bias, row, at + HALF, inside, R, kind, width, SEGMENTS, BIAS)
    slot = tl.load(slots + row)

    value = slot * (GROUPS * DIM) + (heads - QUERIES - GROUPS) * DIM + columns
    is_value = inside & (heads >= QUERIES + GROUPS)
    if LARGEST == 0:
        tl.store(values + value, low, is_value)
        tl.store(values + value + HALF, high, is_value)

    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    whole = columns < HALF
    if NORM:
        squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
        scale = inverse_rms(squares, DIM, eps)[:, None]
        of_query = tl.load(query_weight + columns, whole, 0.0)
        of_key = tl.load(key_weight + columns, whole, 0.0)
        weight_low = tl.where(heads < QUERIES, of_query, of_key)
        of_query = tl.load(query_weight + HALF + columns, whole, 0.0)
        of_key = tl.load(key_weight + HALF + columns, whole, 0.0)
        weight_high = tl.where(heads < QUERIES, of_query, of_key)
        wide_low = weighted(wide_low * scale, weight_low, kind).to(kind).to(tl.float32)
        wide_high = weighted(wide_high * scale, weight_high, kind).to(kind).to(tl.float32)

    turn = row * DIM + columns
    cos_low = tl.load(cos + turn, whole, 0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + HALF, whole, 0.0).to(tl.float32)
    sin_low = tl.load(signed_sin + turn, whole, 0.0).to(tl.float32)
    sin_high = tl.load(signed_sin + turn + HALF, whole, 0.0).to(tl.float32)
    # As the reference: the product with the sine is rounded, the sum with the other product once.
    turned_low = ((wide_high * sin_low).to(kind).to(tl.float32) + wide_low * cos_low).to(kind)
    turned_high = ((wide_low * sin_high).to(kind).to(tl.float32) + wide_high * cos_high).to(kind)

    query = row * (QUERIES * DIM) + heads * DIM + columns
    is_query = inside & (heads < QUERIES)
    tl.store(queries + query, turned_low, is_query)
    tl.store(queries + query + HALF, turned_high, is_query)
    if LARGEST > 0:
        turned_low = tl.where(is_value, low, turned_low).to(tl.float32)
        turned_high = tl.where(is_value, high, turned_high).to(tl.float32)
        own = scale_of(turned_low, turned_high, LARGEST)
        turned_low = narrowed(turned_low, own, keys.dtype.element_ty, LARGEST)
        turned_high = narrowed(turned_high, own, keys.dtype.element_ty, LARGEST)
        has = (heads >= QUERIES) & (heads < QUERIES + 2 * GROUPS)
        tl.store(scales + slot * (2 * GROUPS) + heads - QUERIES, own[:, None], has)
        tl.store(values + value, turned_low, is_value)
        tl.store(values + value + HALF, turned_high, is_value)
    key = slot * (GROUPS * DIM) + (heads - QUERIES) * DIM + columns
    is_key = inside & (heads >= QUERIES) & (heads < QUERIES + GROUPS)
    tl.store(keys + key, turned_low, is_key)
    tl.store(keys + key + HALF, turned_high, is_key)


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
    scales: Tensor | None = None,
) -> Tensor:
    """As :func:`foresay.verifier.ops.rope.rotate_and_store`."""
    groups, dim = keys.shape[-2:]
    (product, bias), about = as_read(qkv)
    rows, width = product.shape[-2:]
    count = width // dim - 2 * groups
    whole = (product, cos, signed_sin, keys, values, slots)
    assert all(tensor.is_contiguous() for tensor in whole), "rows lie one behind the other"
    assert product.data_ptr() % 16 == 0, "other alignments are compiled otherwise, and may sum in another order"
    queries = cos.new_empty(rows, count, dim)
    if rows:
        rotate_and_store_rows[(rows, triton.cdiv(count + 2 * groups, _HEADS))](
            product,
            bias,
            cos,
            signed_sin,
            product if query_norm is None else query_norm,
            product if key_norm is None else key_norm,
            queries,
            *as_stored(keys, values, scales),
            slots,
            rows,
            eps,
            QUERIES=count,
            GROUPS=groups,
            DIM=dim,
            HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            HEADS=_HEADS,
            NORM=query_norm is not None,
            LARGEST=0.0 if scales is None else LARGEST[keys.dtype],
            **about,
            **chained(),
        )
    return queries
