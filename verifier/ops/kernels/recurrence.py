"""Kernels of :mod:`foresay.verifier.ops.recurrence`, for a GPU; those that convolve and finish, for a CPU too.

::

    convolve_rows   a row and one of its heads: the convolution, keys and queries of length 1, shares, decays, records
    remember_rows   a path and some values of one head, row by row: updates the state in registers, and reads it
    finish_rows     a row and one of its heads: the norm, and the gate
    replay_states   a path and 16 values of one head: like remember_rows, from records, without reading
    replay_tails    the rows that the convolution still needs after a path
    short_rows      a row and some of its channels: only a convolution

A text is one path. Each leaf of a tree has a program, which goes from the committed state down to the leaf: rows that
several paths share are computed by each, with the same operations, and written by the one whose leaf comes last. Node
states are not stored. All use one loop, whose sums are over a whole state, in an order fixed by its shape. No product
is fused with a sum unless that is written here, so all variants of a kernel have the same bits. Mamba-2's rows (SCANS)
differ in what is learned and in what surrounds the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.kvpaging.states import LANES, NODES, LayerStates
from foresay.verifier.ops.kernels.pdl import gdc_wait
from foresay.verifier.ops.kernels.rows import kept
from foresay.verifier.ops.launch import launch, padded

_WORD = tl.constexpr(NODES)
_TILE = tl.constexpr(LANES)
_EPS = tl.constexpr(1e-6)
_SIZES = ["sequences"]


def replay_paths(
    layers: LayerStates, targets: Tensor, lengths: Tensor, taken: Tensor, paths: Tensor, page_size: int, first: int = 0
) -> None:
    """As the op of this name."""
    (number, pages, heads, tiles, dim, _), (_, _, tail, channels) = layers.states.shape, layers.tails.shape
    (sequences, deepest), nodes = paths.shape, layers.rows.shape[1]
    where = (paths, taken, lengths, targets, page_size, first * NODES, deepest, sequences, pages, nodes)
    if heads:
        width = tiles * LANES
        sizes = {"HEADS": heads, "KEYS": (channels - heads * width) // 2, "DIM": dim, "WIDTH": width}
        launch(
            "recurrence.replay_states", (number * sequences, heads, tiles), (layers.states, layers.records, *where),
            {**sizes, "BLOCK": padded(dim)}, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    block = min(padded(channels), 256)
    launch(
        "recurrence.replay_tails", (number * sequences, -(-channels // block), 2), (layers.tails, layers.rows, *where),
        {"CHANNELS": channels, "TAIL": tail, "BLOCK": block}, num_warps=2,
    )  # fmt: skip


@triton.jit
def _sequence_of(row, offsets, sequences, SEQUENCES: tl.constexpr):
    """The sequence of a row; the one after the last for padding."""
    at = tl.arange(0, SEQUENCES)
    ends = tl.load(offsets + 1 + at, at < sequences, 2147483647)
    return tl.sum((ends <= row).to(tl.int32), axis=0)


@triton.jit
def _is_text(sequence, is_text, TREES: tl.constexpr, TEXTS: tl.constexpr):
    if not TREES:
        return sequence >= 0
    elif TEXTS:
        return tl.load(is_text + sequence) != 0
    else:
        return sequence < 0


@triton.jit
def _has(words, node):
    """Which words have this node. A text's rows from the 64th on are none: a shift by so many is undefined."""
    return (((words >> (node & (_WORD - 1)).to(tl.int64)) & 1) == 1) & (node < _WORD)


@triton.jit
def last_above(word, node):
    """The last node of a word before this one; -1 if there is none. The CPU has its own."""
    at = tl.arange(0, _WORD)
    return tl.max(tl.where(_has(word, at) & (at < node), at, -1), axis=0)


@triton.jit
def _before(word, own, text, BACK: tl.constexpr):
    """The row ``BACK`` rows back on a row's path, numbered like ``own``; negative if it is before the first."""
    node, missing = own, 0
    if BACK > 0:
        for _ in tl.static_range(BACK):
            node = last_above(word, node)
            missing += (node < 0).to(tl.int32)
    return tl.where(text, own - BACK, tl.where(node < 0, -missing, node))


@triton.jit
def _row_at(raw, second, tails, page, fresh, begin, before, columns, inside, CHANNELS: tl.constexpr,
            STRIDE: tl.constexpr, TAPS: tl.constexpr, LET_IN: tl.constexpr):  # fmt: skip
    """fp32[BLOCK]: a row of the pass, or, if negative, one of the tail. LET_IN: it is multiplied by the values at
    ``second``."""
    line = (begin + tl.maximum(before, 0)).to(tl.int64) * STRIDE
    kept_line = (page * (TAPS - 1) + (TAPS - 1 + tl.minimum(before, -1))).to(tl.int64) * CHANNELS
    row = tl.where(before < 0, tails + kept_line, raw + line)
    value = tl.load(row + columns, inside & ((before >= 0) | (fresh == 0)), 0.0)
    if LET_IN:
        value = value * tl.load(second + line + columns, inside & (before >= 0), 1.0)
    return value


@triton.jit
def _convolved(total, raw, second, weights, tails, page, fresh, begin, own, word, text, columns, inside,
               CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, LET_IN: tl.constexpr):  # fmt: skip
    """fp32[BLOCK]: the oldest row first, added to ``total``."""
    for tap in tl.static_range(TAPS):
        before = _before(word, own, text, TAPS - 1 - tap)
        value = _row_at(raw, second, tails, page, fresh, begin, before, columns, inside, CHANNELS, STRIDE, TAPS, LET_IN)
        total = tl.fma(tl.load(weights + tap * CHANNELS + columns, inside, 0.0), value, total)
    return total


@triton.jit
def _keep(own_row, raw, second, tails, page, fresh, begin, own, text, stops, pages, columns, inside,
          CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, LET_IN: tl.constexpr):  # fmt: skip
    """Copy a row to the tails of stops, and with the first row what remains of the tail before."""
    for stop in tl.static_range(2):
        rows, goal = tl.load(stops + stop), tl.load(pages + 1 + stop).to(tl.int64)
        first, base = own - rows + TAPS - 1, tails + goal * ((TAPS - 1) * CHANNELS)
        here = text & (own < rows)
        tl.store(base + first * CHANNELS + columns, own_row, inside & here & (first >= 0))
        for at in tl.static_range(TAPS - 1):
            left = here & (own == 0) & (at < TAPS - 1 - rows)
            before = at + rows - (TAPS - 1)
            old = _row_at(
                raw, second, tails, page, fresh, begin, tl.minimum(before, -1), columns, inside & left, CHANNELS,
                STRIDE, TAPS, LET_IN,
            )  # fmt: skip
            tl.store(base + at * CHANNELS + columns, old, inside & left)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """``x * sigmoid(x)``; the CPU has its own."""
    return x * _sigmoid(x)


@triton.jit
def mean_of(total, COUNT: tl.constexpr):
    """``total / COUNT``; the CPU has its own."""
    return total / COUNT


@triton.jit
def _softplus(x):
    """``log(1 + e^x)``, accurate for small results."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    near = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.maximum(x, 0.0) + near


@triton.jit(do_not_specialize=_SIZES)
def convolve_rows(mixed, rates, weights, bias, decay, shift, tails, records, kept_rows, offsets, lengths, words,
                  is_text, pages, stops, nodes, made, gains, sequences, HEADS: tl.constexpr, KEYS: tl.constexpr,
                  DIM: tl.constexpr, WIDTH: tl.constexpr, SCANS: tl.constexpr, TREES: tl.constexpr, TEXTS: tl.constexpr,
                  SEQUENCES: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, PART: tl.constexpr,
                  BLOCK: tl.constexpr, GAINS: tl.constexpr, SCALE: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, queries, keys and values): a head of one row, of values PART; the first has all GAINS, shares and
    decays. PADDED: whether there are rows after the last sequence's."""
    gdc_wait(USE_GDC)
    channels: tl.constexpr = 2 * KEYS + HEADS * WIDTH
    stride: tl.constexpr = channels + HEADS * WIDTH
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    groups: tl.constexpr = KEYS // DIM
    rates_of: tl.constexpr = HEADS if SCANS else 2 * HEADS
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(row, offsets, sequences, SEQUENCES)
    real = sequence < sequences if PADDED else True
    sequence = tl.minimum(sequence, sequences - 1)
    begin, text = tl.load(offsets + sequence), _is_text(sequence, is_text, TREES, TEXTS)
    word = tl.load(words + row) if TREES else tl.zeros([], tl.int64)
    own, fresh, page = row - begin, tl.load(lengths + sequence) == 0, tl.load(pages + sequence * 3)
    is_value, columns = head >= 2 * groups, tl.arange(0, BLOCK)
    inside = (columns < (DIM if DIM == PART else tl.where(is_value, PART, DIM))) & real
    columns += tl.where(is_value, 2 * KEYS + (head - 2 * groups) * PART, head * DIM)
    total = tl.load(bias + columns, inside, 0.0) if SCANS else tl.zeros([BLOCK], tl.float32)
    value = _convolved(total, mixed, mixed, weights, tails, page, fresh, begin, own, word, text, columns, inside,
                       channels, stride, TAPS, False)  # fmt: skip
    value = silu(value)
    if not SCANS:
        value = kept(value)
        scale = tl.where(head < groups, SCALE, 1.0) / tl.sqrt_rn(tl.sum(value * value, axis=0) + _EPS)
        value *= tl.where(is_value, 1.0, scale)
    tl.store(made + row.to(tl.int64) * channels + columns, value, inside)
    raw = tl.load(mixed + row.to(tl.int64) * stride + columns, inside, 0.0)
    node = own - tl.where(text, tl.load(nodes + sequence), 0)
    record = (sequence * _WORD + tl.maximum(node, 0)).to(tl.int64)
    tl.store(kept_rows + record * channels + columns, raw, inside & (node >= 0))
    is_key = (head >= groups) & (head < 2 * groups)
    tl.store(records + record * record_width + columns - KEYS, value, inside & is_key & (node >= 0))
    at = tl.arange(0, GAINS)
    mine = (at < HEADS) & (head == 0) & real
    gate = tl.load(rates + row * rates_of + at, mine, 0.0)
    forget = tl.load(rates + row * rates_of + rates_of - HEADS + at, mine, 0.0)
    step = _softplus(forget + tl.load(shift + at, mine, 0.0))
    fades = tl.exp(tl.load(decay + at, mine, 0.0) * step)
    tl.store(gains + row * 2 * HEADS + at, step if SCANS else _sigmoid(gate), mine)
    tl.store(gains + row * 2 * HEADS + HEADS + at, fades, mine)
    tl.store(records + record * record_width + KEYS + HEADS * WIDTH + at, fades, mine & (node >= 0))
    _keep(raw, mixed, mixed, tails, page, fresh, begin, own, text, stops + sequence * 2, pages + sequence * 3,
          columns, inside, channels, stride, TAPS, False)  # fmt: skip


@triton.jit
def _stepped(state, keys, learned, decay):
    """The state after a row: [D, 16], from keys [D, 1] and the updates of 16 values, [1, 16]."""
    keys, learned = tl.broadcast(keys, state)[0], tl.broadcast(learned, state)[0]
    return tl.fma(keys, learned, state * decay)


@triton.jit(do_not_specialize=["sequences", "paths"])
def remember_rows(made, gains, skip, states, records, offsets, lengths, words, is_text, pages, stops, nodes, out,
                  sequences, paths, HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
                  SCANS: tl.constexpr, TREES: tl.constexpr, TEXTS: tl.constexpr, SEQUENCES: tl.constexpr,
                  BY_ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (leaves, HEADS, WIDTH / VALUES): each row is a leaf (BY_ROWS), or each sequence has ``paths`` of them."""
    gdc_wait(USE_GDC)
    channels: tl.constexpr = 2 * KEYS + HEADS * WIDTH
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    number, head, first_value = tl.program_id(0), tl.program_id(1), tl.program_id(2) * VALUES
    if BY_ROWS:  # padding is no leaf: it is after the last sequence's rows
        sequence = tl.minimum(_sequence_of(number, offsets, sequences, SEQUENCES), sequences - 1)
        leaf = number - tl.load(offsets + sequence)
    else:
        sequence, leaf = number // paths, number % paths
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    text = _is_text(sequence, is_text, TREES, TEXTS)
    at, row = tl.arange(0, _WORD), begin + leaf
    count = tl.where(text & (leaf == 0), end - begin, 0)
    word = tl.zeros([], tl.int64)
    others = tl.zeros([_WORD], tl.int64)
    if TREES:
        of_tree = (row < end) & ~text
        word = tl.load(words + row, of_tree, 0)
        others = tl.load(words + begin + at, (begin + at < end) & ~text, 0)
        last = tl.max(tl.where(_has(others, leaf), at, -1), axis=0)
        nodes_above = tl.sum(_has(word, at).to(tl.int32), axis=0)
        count = tl.where(of_tree & (last == leaf), nodes_above, count)
    key = tl.arange(0, BLOCK)[:, None]
    columns = first_value + tl.arange(0, VALUES)[None, :]
    tile, lanes = first_value // _TILE, first_value % _TILE + tl.arange(0, VALUES)[None, :]
    cell = ((head * (WIDTH // _TILE) + tile) * DIM + key) * _TILE + lanes
    size: tl.constexpr = HEADS * WIDTH * DIM
    known = (key < DIM) & (tl.load(lengths + sequence) > 0)
    state = tl.load(states + tl.load(pages + sequence * 3).to(tl.int64) * size + cell, known & (count > 0), 0.0)
    group, first, node = head // (HEADS * DIM // KEYS), tl.load(nodes + sequence), -1
    for order in range(count):
        mine = text
        if TREES:
            node = tl.where(text, order, tl.min(tl.where(_has(word, at) & (at > node), at, _WORD), axis=0))
            mine = text | (tl.max(tl.where(_has(others, node), at, -1), axis=0) == leaf)
        else:
            node = order
        here = (begin + node).to(tl.int64)
        query = tl.load(made + here * channels + group * DIM + key, key < DIM, 0.0)
        keys = tl.load(made + here * channels + KEYS + group * DIM + key, key < DIM, 0.0)
        share, decay = tl.load(gains + here * 2 * HEADS + head), tl.load(gains + here * 2 * HEADS + HEADS + head)
        value = tl.load(made + here * channels + 2 * KEYS + head * WIDTH + columns)
        known_of_key = 0.0 if SCANS else tl.sum(keys * (state * decay), axis=0)[None, :]
        learned = (value - known_of_key) * share
        state = _stepped(state, keys, learned, decay)
        read = tl.sum(query * state, axis=0)[None, :]
        if SCANS:
            read = tl.fma(value, tl.broadcast(tl.load(skip + head), value)[0], read)
        tl.store(out + here * (HEADS * WIDTH) + head * WIDTH + columns, read, mine)
        own = tl.where(text, node - first, node)
        record = (sequence * _WORD + tl.maximum(own, 0)).to(tl.int64) * record_width + KEYS
        tl.store(records + record + head * WIDTH + columns, learned, mine & (own >= 0))
        for stop in tl.static_range(2):
            if tl.load(stops + sequence * 2 + stop) == tl.where(text, order + 1, -1):
                goal = tl.load(pages + sequence * 3 + 1 + stop).to(tl.int64)
                tl.store(states + goal * size + cell, state, key < DIM)


@triton.jit
def finish_rows(out, mixed, weight, done, eps, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                SHARED: tl.constexpr, BLOCK: tl.constexpr, SCANS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, PARTS): a head, or what a scan normalises together, after its gate."""
    gdc_wait(USE_GDC)
    row, part, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(out + (row * PARTS + part) * WIDTH + columns, inside, 0.0)
    gate = tl.load(mixed + row * (CHANNELS + PARTS * WIDTH) + CHANNELS + part * WIDTH + columns, inside, 0.0)
    gate = silu(gate)
    if SCANS:
        value = kept(value * gate)
    value *= 1.0 / tl.sqrt_rn(mean_of(tl.sum(value * value, axis=0), WIDTH) + eps)
    value *= tl.load(weight + (part * WIDTH + columns if SCANS else columns), inside, 0.0)
    if not SCANS:
        value *= gate
    goal = row * PARTS + part % SHARED * (PARTS // SHARED) + part // SHARED
    tl.store(done + goal * WIDTH + columns, value.to(done.dtype.element_ty), inside)


@triton.jit(do_not_specialize=_SIZES)
def short_rows(mixed, weights, tails, kept_rows, offsets, lengths, words, is_text, pages, stops, nodes, done, sequences,
               TREES: tl.constexpr, TEXTS: tl.constexpr, SEQUENCES: tl.constexpr, PADDED: tl.constexpr,
               CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, blocks of channels)."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, second = columns < CHANNELS, mixed + 2 * CHANNELS
    sequence = _sequence_of(row, offsets, sequences, SEQUENCES)
    inside &= sequence < sequences if PADDED else True
    sequence = tl.minimum(sequence, sequences - 1)
    begin, text = tl.load(offsets + sequence), _is_text(sequence, is_text, TREES, TEXTS)
    word = tl.load(words + row) if TREES else tl.zeros([], tl.int64)
    own, fresh, page = row - begin, tl.load(lengths + sequence) == 0, tl.load(pages + sequence * 3)
    total = _convolved(tl.zeros([BLOCK], tl.float32), mixed, second, weights, tails, page, fresh, begin, own, word,
                       text, columns, inside, CHANNELS, 3 * CHANNELS, TAPS, True)  # fmt: skip
    line = row.to(tl.int64) * 3 * CHANNELS + columns
    out = total * tl.load(mixed + line + CHANNELS, inside, 0.0)
    tl.store(done + row.to(tl.int64) * CHANNELS + columns, out.to(done.dtype.element_ty), inside)
    raw = tl.load(mixed + line, inside, 0.0) * tl.load(second + line, inside, 0.0)
    node = own - tl.where(text, tl.load(nodes + sequence), 0)
    record = (sequence * _WORD + tl.maximum(node, 0)).to(tl.int64)
    tl.store(kept_rows + record * CHANNELS + columns, raw, inside & (node >= 0))
    _keep(raw, mixed, second, tails, page, fresh, begin, own, text, stops + sequence * 2, pages + sequence * 3,
          columns, inside, CHANNELS, 3 * CHANNELS, TAPS, True)  # fmt: skip


_PLACES = ["size", "first", "deepest", "sequences", "pages", "nodes"]


@triton.jit
def _path_of(sequence, layer, taken, lengths, targets, size, pages):
    """Of a sequence's path: how many nodes, of these up to the last page boundary inside; whether its text is at its
    beginning; its state pages in a layer: the first, the one after the path, the boundary's."""
    count, at = tl.load(taken + sequence).to(tl.int32), tl.load(lengths + sequence).to(tl.int32)
    inside = tl.where(count > 0, tl.maximum((at + count - 1) // size * size - at, 0), 0)
    source = layer * pages + tl.load(targets + sequence * 3)
    goal, boundary = layer * pages + tl.load(targets + sequence * 3 + 1), tl.load(targets + sequence * 3 + 2)
    return count, inside, at == 0, source, goal, layer * pages + boundary


@triton.jit(do_not_specialize=_PLACES)
def replay_states(states, records, paths, taken, lengths, targets, size, first, deepest, sequences, pages, nodes,
                  HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
                  BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (layers * sequences, HEADS, tiles). nodes: the capacity of a layer's records."""
    gdc_wait(USE_GDC)
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    state_size: tl.constexpr = HEADS * WIDTH * DIM
    layer, sequence = (tl.program_id(0) // sequences).to(tl.int64), tl.program_id(0) % sequences
    head, tile, key = tl.program_id(1), tl.program_id(2), tl.arange(0, BLOCK)[:, None]
    count, inside, fresh, source, goal, boundary = _path_of(sequence, layer, taken, lengths, targets, size, pages)
    columns = tl.arange(0, _TILE)[None, :]
    cell = ((head * (WIDTH // _TILE) + tile) * DIM + key) * _TILE + columns
    known = (key < DIM) & (count > 0)
    state = tl.load(states + source * state_size + cell, known & (fresh == 0), 0.0)
    for number in range(count):
        node = first + sequence * _WORD + tl.load(paths + sequence * deepest + number)
        record = (layer * nodes + node) * record_width
        keys = tl.load(records + record + head // (HEADS * DIM // KEYS) * DIM + key, key < DIM, 0.0)
        learned = tl.load(records + record + KEYS + head * WIDTH + tile * _TILE + columns)
        state = _stepped(state, keys, learned, tl.load(records + record + KEYS + HEADS * WIDTH + head))
        tl.store(states + boundary * state_size + cell, state, known & (number + 1 == inside))
    tl.store(states + goal * state_size + cell, state, known)


@triton.jit(do_not_specialize=_PLACES)
def replay_tails(tails, kept, paths, taken, lengths, targets, size, first, deepest, sequences, pages, nodes,
                 CHANNELS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (layers * sequences, blocks of channels, 2): after the whole path, and at the boundary inside."""
    gdc_wait(USE_GDC)
    layer, sequence = (tl.program_id(0) // sequences).to(tl.int64), tl.program_id(0) % sequences
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole, inside, fresh, source, goal, boundary = _path_of(sequence, layer, taken, lengths, targets, size, pages)
    count, page = tl.where(tl.program_id(2) == 0, whole, inside), tl.where(tl.program_id(2) == 0, goal, boundary)
    there = (columns < CHANNELS) & (count > 0)
    for index in tl.static_range(TAIL):
        number = count + index - TAIL
        node = tl.load(paths + sequence * deepest + tl.maximum(number, 0), number >= 0, 0)
        row = layer * nodes + first + sequence * _WORD + node
        new = tl.load(kept + row * CHANNELS + columns, there & (number >= 0), 0.0)
        before = (source * TAIL + number + TAIL) * CHANNELS + columns
        old = tl.load(tails + before, there & (number < 0) & (fresh == 0), 0.0)
        tl.store(tails + (page * TAIL + index) * CHANNELS + columns, tl.where(number >= 0, new, old), there)
