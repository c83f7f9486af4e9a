"""Row-wise kernels: norms, alone or after a residual add; the input rows of a pass; the gate of attention's output.
Every kernel is for GPU and CPU (:mod:`foresay.verifier.ops.launch`)."""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.chain import wait_turn
from foresay.verifier.ops.kernels.key_blocks import LOG2_E, softcapped
from foresay.verifier.ops.kernels.linear import ROWS, product_at

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def kept(x):
    """``x``, which is read several times: a CPU kernel saves it in memory."""
    return x


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


@triton.jit(do_not_specialize=ROWS)
def norm_rows(x, y, bias, weight, shift, out, R, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
              NORM: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr, SEGMENTS: tl.constexpr,
              BIAS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """x += SHARE y, a product with its bias, unless SHARE is 0; then out = norm(x) if NORM. One program per row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if NORM:
        factor, offset = weights_of(weight, shift, columns, inside, SHIFTED)
    wait_turn(CHAINED)
    number = tl.program_id(0)
    start = number.to(tl.int64) * WIDTH
    row = tl.load(x + start + columns, inside, 0.0)
    if SHARE != 0.0:
        kind: tl.constexpr = row.dtype
        # The sum is rounded before it is normalised: the next layer reads it back from memory.
        added = product_at(y, bias, number, columns, inside, R, kind, WIDTH, SEGMENTS, BIAS)
        if SHARE != 1.0:
            added = (added.to(tl.float32) * SHARE).to(kind)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(x + start + columns, row, inside)
    if NORM:
        made = normed(row, factor, offset, inside, eps, WIDTH, SHIFTED, CENTRED)
        tl.store(out + start + columns, made, inside)


@triton.jit(do_not_specialize=["width"])
def taken_rows(table, indices, out, width, PLACED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (R,): one row of a table; the one of the same number unless PLACED."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, index = columns < width, tl.load(indices + row) if PLACED else row
    tl.store(out + row * width + columns, tl.load(table + index * width + columns, inside), inside)


@triton.jit(do_not_specialize=["width", "taken"])
def taken_columns(x, indices, out, width, taken, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (R,): some numbers of a row."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < taken
    tl.store(
        out + row * taken + columns, tl.load(x + row * width + tl.load(indices + columns, inside, 0), inside), inside
    )


@triton.jit
def both_rows(first, second, indices, out_first, out_second, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R,): one row of two tables."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, index = columns < WIDTH, tl.load(indices + row)
    tl.store(out_first + row * WIDTH + columns, tl.load(first + index * WIDTH + columns, inside, 0.0), inside)
    tl.store(out_second + row * WIDTH + columns, tl.load(second + index * WIDTH + columns, inside, 0.0), inside)


@triton.jit
def embedded_rows(table, tokens, weight, shift, x, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                  NORM: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R,): x = table[token], out = norm(x) if NORM."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if NORM:
        factor, offset = weights_of(weight, shift, columns, inside, SHIFTED)
    wait_turn(CHAINED)
    read = tl.load(table + tl.load(tokens + row) * WIDTH + columns, inside, 0.0)
    tl.store(x + row * WIDTH + columns, read, inside)
    if NORM:
        made = normed(read, factor, offset, inside, eps, WIDTH, SHIFTED, CENTRED)
        tl.store(out + row * WIDTH + columns, made, inside)


@triton.jit
def paired_rows(table, tokens, hidden, of_token, of_hidden, out, stream, eps, KNOWN: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr, NORMED: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, 2). out: [R, 2 WIDTH], norms of table[token] and of hidden. stream: hidden, or its norm if NORMED."""
    wait_turn(CHAINED)
    row, part, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, of_both = columns < WIDTH, row * 2 * WIDTH + part * WIDTH + columns
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), KNOWN - 1)
    source = tl.where(part == 0, table + token * WIDTH, hidden + row * WIDTH)
    factor = tl.load(tl.where(part == 0, of_token, of_hidden) + columns, inside, 0.0)
    read = tl.load(source + columns, inside, 0.0)
    made = normed(read, factor, factor, inside, eps, WIDTH, False, False)
    tl.store(out + of_both, made, inside)
    tl.store(stream + row * WIDTH + columns, made if NORMED else read, inside & (part == 1))


@triton.jit(do_not_specialize=ROWS)
def gate_rows(x, gate, bias, R, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
              COLUMNS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, WIDTH / COLUMNS). gate: a product with its bias."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, where = columns < WIDTH, x + row.to(tl.int64) * WIDTH + columns
    kind: tl.constexpr = x.dtype.element_ty
    wide = product_at(gate, bias, row, columns, inside, R, kind, WIDTH, SEGMENTS, BIAS).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-wide))).to(kind)
    tl.store(where, (tl.load(where, inside, 0.0).to(tl.float32) * opened.to(tl.float32)).to(kind), inside)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """``CAP * tanh(x / CAP)``; the CPU has its own."""
    return softcapped(x * (2.0 * _LOG2_E / CAP), CAP)


@triton.jit
def finish_rows(logits, scale, WIDTH: tl.constexpr, CAP: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (W, WIDTH / COLUMNS). CAP: 0 for none."""
    wait_turn(CHAINED)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, where = columns < WIDTH, logits + tl.program_id(0).to(tl.int64) * WIDTH + columns
    value = tl.load(where, inside) * scale
    if CAP > 0.0:
        value = capped(value, CAP)
    tl.store(where, value, inside)
