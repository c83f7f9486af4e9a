"""What a pass begins with, a program for each row: cosines and sines, embeddings, and the norms of what is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.norm import as_normed, block, normed, warps, weights_of
from foresay.verifier.ops.records import Norm


@triton.jit
def both_rows(first, second, places, out_first, out_second, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R,): one row of two tables."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, place = columns < WIDTH, tl.load(places + row)
    tl.store(out_first + row * WIDTH + columns, tl.load(first + place * WIDTH + columns, inside, 0.0), inside)
    tl.store(out_second + row * WIDTH + columns, tl.load(second + place * WIDTH + columns, inside, 0.0), inside)


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
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if tl.program_id(1) == 0:
        token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), KNOWN - 1)
        read, factor = tl.load(table + token * WIDTH + columns, inside, 0.0), tl.load(of_token + columns, inside, 0.0)
        made = normed(read, factor, factor, inside, eps, WIDTH, False, False)
        tl.store(out + row * 2 * WIDTH + columns, made, inside)
    else:
        read, factor = tl.load(hidden + row * WIDTH + columns, inside, 0.0), tl.load(of_hidden + columns, inside, 0.0)
        made = normed(read, factor, factor, inside, eps, WIDTH, False, False)
        tl.store(out + (row * 2 + 1) * WIDTH + columns, made, inside)
        tl.store(stream + row * WIDTH + columns, made if NORMED else read, inside)


def take_both(first: Tensor, second: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.take.take_both`."""
    assert all(each.is_contiguous() for each in (first, second, places)), "rows lie one behind the other"
    made = first.new_empty(len(places), first.shape[1]), second.new_empty(len(places), second.shape[1])
    if len(places):
        both_rows[(len(places),)](
            first, second, places, *made, WIDTH=first.shape[1], BLOCK=block(first.shape[1]), num_warps=1, **chained()
        )
    return made


def embed(table: Tensor, tokens: Tensor, how: Norm | None) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.norm.embed`."""
    assert table.is_contiguous() and table.data_ptr() % 16 == 0, "rows begin on 16 bytes, as every new tensor does"
    width = table.shape[1]
    x = table.new_empty(len(tokens), width)
    out = x if how is None else torch.empty_like(x)
    weights, norming = as_normed(how, x)
    if len(tokens):
        embedded_rows[(len(tokens),)](
            table, tokens, *weights, x, out, WIDTH=width, BLOCK=block(width), **norming, num_warps=warps(width),
            **chained(),
        )  # fmt: skip
    return x, out


def pair(
    table: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.norm.pair`."""
    rows, width = hidden.shape
    assert table.is_contiguous() and hidden.is_contiguous(), "rows lie one behind the other"
    assert table.data_ptr() % 16 == 0 and hidden.data_ptr() % 16 == 0, "rows begin on 16 bytes"
    out, stream = hidden.new_empty(rows, 2 * width), torch.empty_like(hidden)
    if rows:
        paired_rows[(rows, 2)](
            table, tokens, hidden, *weights, out, stream, eps, KNOWN=len(table), WIDTH=width, BLOCK=block(width),
            NORMED=keep_normed, num_warps=warps(width), **chained(),
        )  # fmt: skip
    return out, stream
