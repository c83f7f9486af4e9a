"""Row-wise kernels: norms, alone or after a residual add; the input rows of a pass; the gate of attention's output; and
from the rows of the qkv product to rotated queries and stored keys and values, in one launch.

A program that rotates processes one row and a few of its heads, of queries, keys and values; a head is held as its two
halves, which the rotation combines. Every kernel is for GPU and CPU (:mod:`foresay.verifier.ops.launch`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.key_blocks import LOG2_E, narrowed, scale_of, softcapped
from foresay.verifier.ops.kernels.linear import APART, gated, product_at
from foresay.verifier.ops.kernels.pdl import gdc_wait

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def kept(x):
    """``x``, which is read several times: a CPU kernel saves it in memory."""
    return x


@triton.jit
def updated(before, after):
    """``after``, in a loop: a CPU kernel writes it over ``before``, which it saved."""
    return after


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, eps):
    """``1 / sqrt(squares / WIDTH + eps)``, rounded like torch's, not approximated."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / WIDTH + eps))


@triton.jit
def weights_of(weight, shift, columns, inside, SHIFTED: tl.constexpr):
    """A norm's weight, and its bias if SHIFTED. They are constant, and not in the L2: so they are loaded first, before
    waiting for the previous kernel."""
    factor = tl.load(weight + columns, inside, 0.0)
    return factor, tl.load(shift + columns, inside, 0.0) if SHIFTED else factor


@triton.jit
def normed(row, factor, shift, inside, eps, WIDTH: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr):
    """One row's norm, times ``factor``, plus ``shift`` if SHIFTED, in its dtype. CENTRED: its mean is subtracted."""
    wide = row.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.div_rn(tl.sum(wide, axis=0), WIDTH * 1.0), 0.0)
    scale = inverse_rms(tl.sum(wide * wide, axis=0), WIDTH, eps)
    if SHIFTED:
        # Explicit, since the compiler could fuse it in one kernel and not in the next.
        value = tl.fma(as_weighted(wide * scale, factor, row.dtype), factor.to(tl.float32), shift.to(tl.float32))
    else:
        value = weighted(wide * scale, factor, row.dtype)
    return value.to(row.dtype)


@triton.jit
def as_weighted(value, weight, KIND: tl.constexpr):
    """``value`` for the product: in fp32, first rounded to KIND, unless the weight is wider."""
    if weight.dtype == KIND:
        value = value.to(KIND).to(tl.float32)
    return value


@triton.jit
def weighted(value, weight, KIND: tl.constexpr):
    """The product in fp32."""
    return as_weighted(value, weight, KIND) * weight.to(tl.float32)


@triton.jit(do_not_specialize=APART)
def norm_rows(x, y, bias, weight, shift, scalar, out, apart, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              SHARE: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr,
              CENTRED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """x += SHARE y, a product with its bias, unless SHARE is 0, then x *= scalar if SCALED; then out = norm(x) if NORM.
    One program per row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if NORM:
        factor, offset = weights_of(weight, shift, columns, inside, SHIFTED)
    gdc_wait(USE_GDC)
    number = tl.program_id(0)
    start = number.to(tl.int64) * WIDTH
    row = tl.load(x + start + columns, inside, 0.0)
    if SHARE != 0.0:
        kind: tl.constexpr = row.dtype
        # The sum is rounded before it is normalised: the next layer reads it back from memory.
        added = product_at(y, bias, number, columns, inside, apart, kind, WIDTH, SEGMENTS, BIAS)
        if SHARE != 1.0:
            added = (added.to(tl.float32) * SHARE).to(kind)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(kind)
        if SCALED:
            row = (row.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(kind)
        tl.store(x + start + columns, row, inside)
    if NORM:
        made = normed(row, factor, offset, inside, eps, WIDTH, SHIFTED, CENTRED)
        tl.store(out + start + columns, made, inside)


@triton.jit(do_not_specialize=["width", "stride", "first"])
def taken_rows(table, indices, out, width, stride, first, PLACED: tl.constexpr, BLOCK: tl.constexpr,
               USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R,): one row of a table, the one of the same number unless PLACED, to column ``first`` of a row of
    ``stride``."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, index = columns < width, tl.load(indices + row) if PLACED else row
    tl.store(out + row * stride + first + columns, tl.load(table + index * width + columns, inside), inside)


@triton.jit(do_not_specialize=["width"])
def put_rows(table, indices, rows, width, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    """Grid (R,): a row to one of a table."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, index = columns < width, tl.load(indices + row)
    tl.store(table + index * width + columns, tl.load(rows + row * width + columns, inside), inside)


@triton.jit(do_not_specialize=["width", "taken"])
def taken_columns(x, indices, out, width, taken, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    """Grid (R,): some numbers of a row."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < taken
    tl.store(
        out + row * taken + columns, tl.load(x + row * width + tl.load(indices + columns, inside, 0), inside), inside
    )


@triton.jit
def both_rows(first, second, indices, out_first, out_second, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R,): one row of two tables."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, index = columns < WIDTH, tl.load(indices + row)
    tl.store(out_first + row * WIDTH + columns, tl.load(first + index * WIDTH + columns, inside, 0.0), inside)
    tl.store(out_second + row * WIDTH + columns, tl.load(second + index * WIDTH + columns, inside, 0.0), inside)


@triton.jit
def embedded_rows(table, tokens, weight, shift, x, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                  NORM: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R,): x = table[token], out = norm(x) if NORM."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if NORM:
        factor, offset = weights_of(weight, shift, columns, inside, SHIFTED)
    gdc_wait(USE_GDC)
    read = tl.load(table + tl.load(tokens + row) * WIDTH + columns, inside, 0.0)
    tl.store(x + row * WIDTH + columns, read, inside)
    if NORM:
        made = normed(read, factor, offset, inside, eps, WIDTH, SHIFTED, CENTRED)
        tl.store(out + row * WIDTH + columns, made, inside)


@triton.jit
def paired_rows(table, tokens, hidden, of_token, of_hidden, out, stream, eps, KNOWN: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr, NORMED: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, 2). out: [R, 2 WIDTH], norms of table[token] and of hidden. stream: hidden, or its norm if NORMED."""
    gdc_wait(USE_GDC)
    row, part, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, of_both = columns < WIDTH, row * 2 * WIDTH + part * WIDTH + columns
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), KNOWN - 1)
    source = tl.where(part == 0, table + token * WIDTH, hidden + row * WIDTH)
    factor = tl.load(tl.where(part == 0, of_token, of_hidden) + columns, inside, 0.0)
    read = tl.load(source + columns, inside, 0.0)
    made = normed(read, factor, factor, inside, eps, WIDTH, False, False)
    tl.store(out + of_both, made, inside)
    tl.store(stream + row * WIDTH + columns, made if NORMED else read, inside & (part == 1))


@triton.jit(do_not_specialize=APART)
def gate_rows(x, gate, bias, apart, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
              COLUMNS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, WIDTH / COLUMNS). gate: a product with its bias."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, where = columns < WIDTH, x + row.to(tl.int64) * WIDTH + columns
    kind: tl.constexpr = x.dtype.element_ty
    wide = product_at(gate, bias, row, columns, inside, apart, kind, WIDTH, SEGMENTS, BIAS).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-wide))).to(kind)
    tl.store(where, (tl.load(where, inside, 0.0).to(tl.float32) * opened.to(tl.float32)).to(kind), inside)


@triton.jit(do_not_specialize=APART)
def layer_input_rows(product, bias, table, tokens, weight, out, apart, eps, FACTOR: tl.constexpr, SCALE: tl.constexpr,
                     HALF: tl.constexpr, LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                     SEGMENTS: tl.constexpr, BIAS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, LAYERS): out = HALF (norm(FACTOR product) + SCALE table[token]), WIDTH numbers of a layer."""
    own = tl.arange(0, BLOCK)
    inside = own < WIDTH
    kind: tl.constexpr = out.dtype.element_ty
    factor = tl.load(weight + own, inside, 0.0)
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0), tl.program_id(1) * WIDTH + own
    made = product_at(product, bias, row, columns, inside, apart, kind, LAYERS * WIDTH, SEGMENTS, BIAS)
    made = kept((made.to(tl.float32) * FACTOR).to(kind))
    projected = normed(made, factor, factor, inside, eps, WIDTH, False, False).to(tl.float32)
    read = tl.load(table + tl.load(tokens + row) * (LAYERS * WIDTH) + columns, inside, 0.0).to(kind)
    read = (read.to(tl.float32) * SCALE).to(kind).to(tl.float32)
    both = (projected + read).to(kind).to(tl.float32)
    tl.store(out + row.to(tl.int64) * (LAYERS * WIDTH) + columns, (both * HALF).to(kind), inside)


@triton.jit(do_not_specialize=(*APART, "first"))
def gated_input_rows(gate, bias, inputs, out, apart, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
                     BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
                     USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R,): out = gelu(gate) inputs, of which a row's begin with ``first``."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind: tl.constexpr = out.dtype.element_ty
    made = product_at(gate, bias, row, columns, inside, apart, kind, WIDTH, SEGMENTS, BIAS)
    read = tl.load(inputs + row.to(tl.int64) * STRIDE + first + columns, inside, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, gated(made, read, 2), inside)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """``CAP * tanh(x / CAP)``; the CPU has its own."""
    return softcapped(x * (2.0 * _LOG2_E / CAP), CAP)


@triton.jit
def finish_rows(logits, scale, WIDTH: tl.constexpr, CAP: tl.constexpr, COLUMNS: tl.constexpr, USE_GDC: tl.constexpr):
    """Grid (W, WIDTH / COLUMNS). CAP: 0 for none."""
    gdc_wait(USE_GDC)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, where = columns < WIDTH, logits + tl.program_id(0).to(tl.int64) * WIDTH + columns
    value = tl.load(where, inside) * scale
    if CAP > 0.0:
        value = capped(value, CAP)
    tl.store(where, value, inside)


@triton.jit
def _of_row(product, bias, row, heads, apart, eps, kind: tl.constexpr, QUERIES: tl.constexpr, GROUPS: tl.constexpr,
            DIM: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """fp32[HEADS, 1]: the factor of each head if all queries of a row are normalised together, and all keys."""
    own, columns = tl.arange(0, heads.shape[0])[:, None], tl.arange(0, BLOCK)[None, :]
    of_queries = tl.zeros([heads.shape[0]], tl.float32)
    of_keys = tl.zeros([heads.shape[0]], tl.float32)
    width: tl.constexpr = (QUERIES + 2 * GROUPS) * DIM
    for first in range(0, QUERIES + GROUPS, heads.shape[0]):
        those = first + own
        inside, at = (those < QUERIES + GROUPS) & (columns < DIM // 2), those * DIM + columns
        low = product_at(product, bias, row, at, inside, apart, kind, width, SEGMENTS, BIAS)
        high = product_at(product, bias, row, at + DIM // 2, inside, apart, kind, width, SEGMENTS, BIAS)
        squares = _squares(low.to(tl.float32), high.to(tl.float32))
        is_query = first + tl.arange(0, heads.shape[0]) < QUERIES
        of_queries += tl.where(is_query, squares, 0.0)
        of_keys += tl.where(is_query, 0.0, squares)
    query_scale = inverse_rms(tl.sum(of_queries, axis=0), QUERIES * DIM, eps)
    return tl.where(heads < QUERIES, query_scale, inverse_rms(tl.sum(of_keys, axis=0), GROUPS * DIM, eps))


@triton.jit
def _squares(low, high):
    """fp32[HEADS]: the sums of the squares of heads, held as halves."""
    return tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)


@triton.jit
def _weight(of_queries, of_keys, heads, columns, inside, QUERIES: tl.constexpr, GROUPS: tl.constexpr,
            DIM: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The norms' weights of heads at these columns, as far as they are inside."""
    if WHOLE:
        has_key = inside & (heads >= QUERIES) & (heads < QUERIES + GROUPS)
        of_query = tl.load(of_queries + heads * DIM + columns, inside & (heads < QUERIES), 0.0)
        of_key = tl.load(of_keys + (heads - QUERIES) * DIM + columns, has_key, 0.0)
    else:
        of_query = tl.load(of_queries + columns, inside, 0.0)
        of_key = tl.load(of_keys + columns, inside, 0.0)
    return tl.where(heads < QUERIES, of_query, of_key)


@triton.jit(do_not_specialize=APART)
def rotate_and_store_rows(qkv, bias, cos, signed_sin, factor, query_weight, key_weight, queries, keys, values, scales,
                          slots, apart, eps, QUERIES: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
                          HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
                          WHOLE: tl.constexpr, AFTER: tl.constexpr, FACTOR: tl.constexpr, LARGEST: tl.constexpr,
                          ALIKE: tl.constexpr, VALUED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
                          USE_GDC: tl.constexpr):  # fmt: skip
    """The heads of one row, HEADS of them per program; HALF of a head in BLOCK columns. NORM: whether heads are
    normalised, all together if WHOLE, after rotation if AFTER; VALUED: and values, without weight. LARGEST: the largest
    number of the type that keys and values are quantised to; 0: not quantised. ALIKE: values are the product of keys.
    GROUPS: 0 if there are only queries."""
    gdc_wait(USE_GDC)
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (heads < QUERIES + 2 * GROUPS) & (columns < HALF)
    kind: tl.constexpr = queries.dtype.element_ty
    width: tl.constexpr = (QUERIES + (1 if ALIKE else 2) * GROUPS) * DIM
    at = heads * DIM + columns
    if ALIKE:
        at = (heads - tl.where(heads >= QUERIES + GROUPS, GROUPS, 0)) * DIM + columns
    if WHOLE:  # before this program loads its heads
        scale = _of_row(qkv, bias, row, heads, apart, eps, kind, QUERIES, GROUPS, DIM, BLOCK, SEGMENTS, BIAS)
    low = product_at(qkv, bias, row, at, inside, apart, kind, width, SEGMENTS, BIAS)
    high = product_at(qkv, bias, row, at + HALF, inside, apart, kind, width, SEGMENTS, BIAS)
    if GROUPS > 0:
        slot = tl.load(slots + row)
        value = slot * (GROUPS * DIM) + (heads - QUERIES - GROUPS) * DIM + columns
        is_value = inside & (heads >= QUERIES + GROUPS)
        if LARGEST == 0 and not VALUED:
            tl.store(values + value, low, is_value)
            tl.store(values + value + HALF, high, is_value)

    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    whole = columns < HALF
    if NORM and not AFTER:
        if not WHOLE:
            scale = inverse_rms(_squares(wide_low, wide_high), DIM, eps)[:, None]
        if VALUED and GROUPS > 0:
            low, high = (wide_low * scale).to(kind), (wide_high * scale).to(kind)
            if LARGEST == 0:
                tl.store(values + value, low, is_value)
                tl.store(values + value + HALF, high, is_value)
        weight_low = _weight(query_weight, key_weight, heads, columns, whole, QUERIES, GROUPS, DIM, WHOLE)
        weight_high = _weight(query_weight, key_weight, heads, columns + HALF, whole, QUERIES, GROUPS, DIM, WHOLE)
        wide_low = kept(weighted(wide_low * scale, weight_low, kind).to(kind).to(tl.float32))
        wide_high = kept(weighted(wide_high * scale, weight_high, kind).to(kind).to(tl.float32))

    turn = row * DIM + columns
    cos_low = tl.load(cos + turn, whole, 0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + HALF, whole, 0.0).to(tl.float32)
    sin_low = tl.load(signed_sin + turn, whole, 0.0).to(tl.float32)
    sin_high = tl.load(signed_sin + turn + HALF, whole, 0.0).to(tl.float32)
    # As the reference: the product with the sine is rounded, the sum with the other product once.
    turned_low = tl.fma(wide_low, cos_low, (wide_high * sin_low).to(kind).to(tl.float32)).to(kind)
    turned_high = tl.fma(wide_high, cos_high, (wide_low * sin_high).to(kind).to(tl.float32)).to(kind)
    if AFTER:
        wide_low, wide_high = kept(turned_low.to(tl.float32)), kept(turned_high.to(tl.float32))
        scale = inverse_rms(_squares(wide_low, wide_high), DIM, eps)[:, None]
        weight_low = _weight(query_weight, key_weight, heads, columns, whole, QUERIES, GROUPS, DIM, WHOLE)
        weight_high = _weight(query_weight, key_weight, heads, columns + HALF, whole, QUERIES, GROUPS, DIM, WHOLE)
        turned_low = weighted(wide_low * scale, weight_low, kind).to(kind)
        turned_high = weighted(wide_high * scale, weight_high, kind).to(kind)

    query = row * (QUERIES * DIM) + heads * DIM + columns
    is_query = inside & (heads < QUERIES)
    query_low, query_high = turned_low, turned_high
    if FACTOR:
        times = tl.load(factor + row).to(tl.float32)
        query_low = (query_low.to(tl.float32) * times).to(kind)
        query_high = (query_high.to(tl.float32) * times).to(kind)
    tl.store(queries + query, query_low, is_query)
    tl.store(queries + query + HALF, query_high, is_query)
    if LARGEST > 0:
        turned_low = kept(tl.where(is_value, low, turned_low).to(tl.float32))
        turned_high = kept(tl.where(is_value, high, turned_high).to(tl.float32))
        own = scale_of(turned_low, turned_high, LARGEST)
        turned_low = narrowed(turned_low, own, keys.dtype.element_ty, LARGEST)
        turned_high = narrowed(turned_high, own, keys.dtype.element_ty, LARGEST)
        has = (heads >= QUERIES) & (heads < QUERIES + 2 * GROUPS)
        tl.store(scales + slot * (2 * GROUPS) + heads - QUERIES, own[:, None], has)
        tl.store(values + value, turned_low, is_value)
        tl.store(values + value + HALF, turned_high, is_value)
    if GROUPS > 0:
        key = slot * (GROUPS * DIM) + (heads - QUERIES) * DIM + columns
        is_key = inside & (heads >= QUERIES) & (heads < QUERIES + GROUPS)
        tl.store(keys + key, turned_low, is_key)
        tl.store(keys + key + HALF, turned_high, is_key)


@triton.jit
def join_latent_rows(plain, turning, cos, signed_sin, out, slots, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                     HALF: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """A head of a row: WIDTH numbers as they are, then twice HALF, rotated."""
    gdc_wait(USE_GDC)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(slots + row) if PLACED else row
    columns = tl.arange(0, BLOCK)
    whole, half = columns < WIDTH, columns < HALF
    head_at, out_at = row * HEADS + head, (index * HEADS + head) * (WIDTH + 2 * HALF)
    tl.store(out + out_at + columns, tl.load(plain + head_at * WIDTH + columns, whole, 0.0), whole)
    kind: tl.constexpr = out.dtype.element_ty
    low = tl.load(turning + head_at * 2 * HALF + columns, half, 0.0).to(tl.float32)
    high = tl.load(turning + head_at * 2 * HALF + HALF + columns, half, 0.0).to(tl.float32)
    turn = row * 2 * HALF + columns
    cos_low = tl.load(cos + turn, half, 0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + HALF, half, 0.0).to(tl.float32)
    sin_low = tl.load(signed_sin + turn, half, 0.0).to(tl.float32)
    sin_high = tl.load(signed_sin + turn + HALF, half, 0.0).to(tl.float32)
    turned_low = tl.fma(low, cos_low, (high * sin_low).to(kind).to(tl.float32)).to(kind)
    turned_high = tl.fma(high, cos_high, (low * sin_high).to(kind).to(tl.float32)).to(kind)
    tl.store(out + out_at + WIDTH + columns, turned_low, half)
    tl.store(out + out_at + WIDTH + HALF + columns, turned_high, half)
