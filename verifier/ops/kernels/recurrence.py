"""The ops of :mod:`foresay.verifier.ops.recurrence`, for a GPU.

::

    convolve_rows   a row and one of its heads: the convolution, keys and queries of length 1, shares, decays, records
    remember_rows   a path and 16 values of one head, row by row: updates the state in registers, and reads it
    finish_rows     a row and one of its heads: the norm, and the gate
    replay_states   16 values of one head: like remember_rows, from records, without reading
    replay_tails    the rows that the convolution still needs
    short_rows      a row and some of its channels: only a convolution

A text is one path. Each leaf of a tree has a program, which goes from the committed state down to the leaf: rows that
several paths share are computed by each, with the same operations, and written by the one whose leaf comes last. Node
states are not stored. All use one loop, whose sums are over a whole state, in an order fixed by its shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.kvpaging.states import LANES, NODES, LayerStates
from foresay.verifier.ops.kernels.chain import wait_turn
from foresay.verifier.ops.launch import launch, new, padded
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, StateRows

_WORD = tl.constexpr(NODES)
_TILE = tl.constexpr(LANES)
_EPS = tl.constexpr(1e-6)
_SIZES = ["sequences"]


def gated_delta(
    mixed: Tensor,
    rates: Tensor,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
    count: Tensor | None = None,
) -> Tensor:
    """As the op of this name."""
    (heads, tiles, dim, _), (taps, channels) = layer.states.shape[1:], weights.taps.shape
    number, width = len(mixed), tiles * LANES
    keys = (channels - heads * width) // 2
    of_rows, kinds = _of_rows(rows)
    made, gains, out = (new((number, size), mixed) for size in (channels, 2 * heads, heads * width))
    sizes = {"HEADS": heads, "KEYS": keys, "DIM": dim, "WIDTH": width}
    launch(
        "recurrence.convolve_rows",
        (number, 2 * keys // dim + heads),
        (mixed, rates, weights.taps, weights.decay, weights.shift, layer.tails, layer.records, layer.rows, *of_rows,
         made, gains, len(rows.pages)),
        {**sizes, **kinds, "TAPS": taps, "BLOCK": padded(max(dim, width)), "SCALE": dim**-0.5},
        num_warps=1,
    )  # fmt: skip
    paths = 1 if rows.paged.words is None else min(NODES, number)
    launch(
        "recurrence.remember_rows",
        (len(rows.pages) * paths, heads, tiles),
        (made, gains, layer.states, layer.records, *of_rows, out, len(rows.pages), paths),
        {**sizes, **kinds, "BLOCK": padded(dim)},
        num_warps=4,
    )
    done, shared = new(out.shape, out, dtype), heads * dim // keys if weights.tiled else 1
    launch(
        "recurrence.finish_rows",
        (number, heads),
        (out, mixed, weights.norm, done, weights.eps),
        {"HEADS": heads, "WIDTH": width, "CHANNELS": channels, "SHARED": shared, "BLOCK": padded(width)},
        num_warps=1,
    )
    return done


def short_conv(
    mixed: Tensor,
    taps: Tensor,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
    count: Tensor | None = None,
) -> Tensor:
    """As the op of this name."""
    (number, channels), (of_rows, kinds) = taps.shape, _of_rows(rows)
    done, block = new((len(mixed), channels), mixed, dtype), min(padded(channels), 256)
    launch(
        "recurrence.short_rows",
        (len(mixed), -(-channels // block)),
        (mixed, taps, layer.tails, layer.rows, *of_rows, done, len(rows.pages)),
        {**kinds, "CHANNELS": channels, "TAPS": number, "BLOCK": block},
        num_warps=2,
    )
    return done


def replay(layers: LayerStates, source: int, destination: int, fresh: bool, sequence: int, path: Tensor) -> None:
    """As the op of this name."""
    (number, pages, heads, tiles, dim, _), (_, _, tail, channels) = layers.states.shape, layers.tails.shape
    nodes, where = layers.rows.shape[1], (len(path), source, destination, int(fresh), sequence * NODES)
    if heads:
        width = tiles * LANES
        sizes = {"HEADS": heads, "KEYS": (channels - heads * width) // 2, "DIM": dim, "WIDTH": width}
        launch(
            "recurrence.replay_states",
            (number, heads, tiles),
            (layers.states, layers.records, path, *where, pages, nodes),
            {**sizes, "BLOCK": padded(dim)},
            num_warps=4,
        )
    block = min(padded(channels), 256)
    launch(
        "recurrence.replay_tails",
        (number, -(-channels // block)),
        (layers.tails, layers.rows, path, *where, pages, nodes),
        {"CHANNELS": channels, "TAIL": tail, "BLOCK": block},
        num_warps=2,
    )


def _of_rows(rows: StateRows) -> tuple[tuple[Tensor, ...], dict[str, int | bool]]:
    """The rows as kernel arguments; missing ones are replaced by tensors that are not read."""
    paged: AttentionMetadata = rows.paged
    words = paged.offsets if paged.words is None else paged.words
    text = paged.offsets if paged.is_prefill is None else paged.is_prefill
    kinds = {"TREES": paged.words is not None, "TEXTS": paged.is_prefill is not None}
    given = (paged.offsets, paged.lengths, words, text, rows.pages, rows.stops, rows.nodes)
    return given, {**kinds, "SEQUENCES": padded(len(rows.pages))}


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
def _above(word, node):
    """The last node of a word before this one; -1 if there is none."""
    at = tl.arange(0, _WORD)
    return tl.max(tl.where((((word >> at.to(tl.int64)) & 1) == 1) & (at < node), at, -1), axis=0)


@triton.jit
def _before(word, own, text, BACK: tl.constexpr):
    """The row ``BACK`` rows back on a row's path, numbered like ``own``; negative if it is before the first."""
    node, missing = own, 0
    if BACK > 0:
        for _ in tl.static_range(BACK):
            node = _above(word, node)
            missing += (node < 0).to(tl.int32)
    return tl.where(text, own - BACK, tl.where(node < 0, -missing, node))


@triton.jit
def _row_at(raw, second, tails, page, fresh, begin, before, columns, inside, CHANNELS: tl.constexpr,
            STRIDE: tl.constexpr, TAPS: tl.constexpr, LET_IN: tl.constexpr):  # fmt: skip
    """fp32[BLOCK]: a row of the pass, or, if negative, one of the tail. LET_IN: it is multiplied by the values at
    ``second``."""
    place = (begin + tl.maximum(before, 0)).to(tl.int64) * STRIDE + columns
    value = tl.load(raw + place, inside & (before >= 0), 0.0)
    if LET_IN:
        value = value * tl.load(second + place, inside & (before >= 0), 0.0)
    kept = (page * (TAPS - 1) + (TAPS - 1 + tl.minimum(before, -1))).to(tl.int64) * CHANNELS + columns
    old = tl.load(tails + kept, inside & (before < 0) & (fresh == 0), 0.0)
    return tl.where(before < 0, old, value)


@triton.jit
def _convolved(raw, second, weights, tails, page, fresh, begin, own, word, text, columns, inside,
               CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, LET_IN: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """fp32[BLOCK]: the oldest row first."""
    total = tl.zeros([BLOCK], tl.float32)
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
def _softplus(x):
    """``log(1 + e^x)``, accurate for small results."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    near = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.maximum(x, 0.0) + near


@triton.jit(do_not_specialize=_SIZES)
def convolve_rows(mixed, rates, weights, decay, shift, tails, records, kept, offsets, lengths, words, is_text, pages,
                  stops, nodes, made, gains, sequences, HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
                  WIDTH: tl.constexpr, TREES: tl.constexpr, TEXTS: tl.constexpr, SEQUENCES: tl.constexpr,
                  TAPS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, queries, keys and values): a head of one row."""
    wait_turn(CHAINED)
    channels: tl.constexpr = 2 * KEYS + HEADS * WIDTH
    stride: tl.constexpr = channels + HEADS * WIDTH
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    groups: tl.constexpr = KEYS // DIM
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(row, offsets, sequences, SEQUENCES)
    if sequence < sequences:
        begin, text = tl.load(offsets + sequence), _is_text(sequence, is_text, TREES, TEXTS)
        word = tl.load(words + row) if TREES else tl.zeros([], tl.int64)
        own, fresh, page = row - begin, tl.load(lengths + sequence) == 0, tl.load(pages + sequence * 3)
        is_value, columns = head >= 2 * groups, tl.arange(0, BLOCK)
        inside = columns < tl.where(is_value, WIDTH, DIM)
        columns += tl.where(is_value, 2 * KEYS + (head - 2 * groups) * WIDTH, head * DIM)
        value = _convolved(mixed, mixed, weights, tails, page, fresh, begin, own, word, text, columns, inside,
                           channels, stride, TAPS, False, BLOCK)  # fmt: skip
        value = value * _sigmoid(value)
        if not is_value:
            squares = tl.sum(tl.where(inside, value * value, 0.0), axis=0)
            value *= tl.where(head < groups, SCALE, 1.0) / tl.sqrt_rn(squares + _EPS)
        line = row.to(tl.int64) * channels + columns
        tl.store(made + line, value, inside)
        raw = tl.load(mixed + row.to(tl.int64) * stride + columns, inside, 0.0)
        node = own - tl.where(text, tl.load(nodes + sequence), 0)
        record = (sequence * _WORD + tl.maximum(node, 0)).to(tl.int64)
        tl.store(kept + record * channels + columns, raw, inside & (node >= 0))
        is_key = (head >= groups) & (head < 2 * groups)
        tl.store(records + record * record_width + columns - KEYS, value, inside & is_key & (node >= 0))
        if is_value:
            at = head - 2 * groups
            asked, forget = tl.load(rates + row * 2 * HEADS + at), tl.load(rates + row * 2 * HEADS + HEADS + at)
            fades = tl.exp(tl.load(decay + at) * _softplus(forget + tl.load(shift + at)))
            tl.store(gains + row * 2 * HEADS + at, _sigmoid(asked))
            tl.store(gains + row * 2 * HEADS + HEADS + at, fades)
            tl.store(records + record * record_width + KEYS + HEADS * WIDTH + at, fades, node >= 0)
        _keep(raw, mixed, mixed, tails, page, fresh, begin, own, text, stops + sequence * 2, pages + sequence * 3,
              columns, inside, channels, stride, TAPS, False)  # fmt: skip


@triton.jit
def _stepped(state, keys, learned, decay):
    """The state after a row: [D, 16], from keys [D, 1] and the updates of 16 values, [1, 16]."""
    keys, learned = tl.broadcast(keys, state)[0], tl.broadcast(learned, state)[0]
    return tl.fma(keys, learned, state * decay)


@triton.jit(do_not_specialize=["sequences", "paths"])
def remember_rows(made, gains, states, records, offsets, lengths, words, is_text, pages, stops, nodes, out, sequences,
                  paths, HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
                  TREES: tl.constexpr, TEXTS: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
                  CHAINED: tl.constexpr):  # fmt: skip
    """Grid (sequences * paths, HEADS, tiles)."""
    wait_turn(CHAINED)
    channels: tl.constexpr = 2 * KEYS + HEADS * WIDTH
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    sequence, leaf, head, tile = tl.program_id(0) // paths, tl.program_id(0) % paths, tl.program_id(1), tl.program_id(2)
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
        last = tl.max(tl.where(((others >> leaf.to(tl.int64)) & 1) == 1, at, -1), axis=0)
        nodes_above = tl.sum((word >> at.to(tl.int64)) & 1, axis=0).to(tl.int32)
        count = tl.where(of_tree & (last == leaf), nodes_above, count)
    key = tl.arange(0, BLOCK)[:, None]
    columns = tile * _TILE + tl.arange(0, _TILE)[None, :]
    cell = ((head * (WIDTH // _TILE) + tile) * DIM + key) * _TILE + tl.arange(0, _TILE)[None, :]
    size: tl.constexpr = HEADS * WIDTH * DIM
    known = (key < DIM) & (tl.load(lengths + sequence) > 0)
    state = tl.load(states + tl.load(pages + sequence * 3).to(tl.int64) * size + cell, known & (count > 0), 0.0)
    group, first, node = head // (HEADS * DIM // KEYS), tl.load(nodes + sequence), -1
    for number in range(count):
        node = tl.where(
            text, number, tl.min(tl.where((((word >> at.to(tl.int64)) & 1) == 1) & (at > node), at, _WORD), axis=0)
        )
        here = (begin + node).to(tl.int64)
        query = tl.load(made + here * channels + group * DIM + key, key < DIM, 0.0)
        keys = tl.load(made + here * channels + KEYS + group * DIM + key, key < DIM, 0.0)
        share, decay = tl.load(gains + here * 2 * HEADS + head), tl.load(gains + here * 2 * HEADS + HEADS + head)
        value = tl.load(made + here * channels + 2 * KEYS + head * WIDTH + columns)
        faded = state * decay
        learned = (value - tl.sum(keys * faded, axis=0)[None, :]) * share
        state = _stepped(state, keys, learned, decay)
        asked = tl.sum(query * state, axis=0)[None, :]
        owner = tl.max(tl.where(((others >> node.to(tl.int64)) & 1) == 1, at, -1), axis=0)
        mine = text | (owner == leaf)
        tl.store(out + here * (HEADS * WIDTH) + head * WIDTH + columns, asked, mine)
        own = tl.where(text, node - first, node)
        record = (sequence * _WORD + tl.maximum(own, 0)).to(tl.int64) * record_width + KEYS
        tl.store(records + record + head * WIDTH + columns, learned, mine & (own >= 0))
        for stop in tl.static_range(2):
            stops_here = text & (tl.load(stops + sequence * 2 + stop) == number + 1)
            goal = tl.load(pages + sequence * 3 + 1 + stop).to(tl.int64)
            tl.store(states + goal * size + cell, state, stops_here & (key < DIM))


@triton.jit
def finish_rows(out, mixed, weight, done, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                SHARED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, HEADS)."""
    wait_turn(CHAINED)
    row, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(out + (row * HEADS + head) * WIDTH + columns, inside, 0.0)
    value *= 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / WIDTH + eps)
    gate = tl.load(mixed + row * (CHANNELS + HEADS * WIDTH) + CHANNELS + head * WIDTH + columns, inside, 0.0)
    value = value * tl.load(weight + columns, inside, 0.0) * (gate * _sigmoid(gate))
    goal = row * HEADS + head % SHARED * (HEADS // SHARED) + head // SHARED
    tl.store(done + goal * WIDTH + columns, value.to(done.dtype.element_ty), inside)


@triton.jit(do_not_specialize=_SIZES)
def short_rows(mixed, weights, tails, kept, offsets, lengths, words, is_text, pages, stops, nodes, done, sequences,
               TREES: tl.constexpr, TEXTS: tl.constexpr, SEQUENCES: tl.constexpr, CHANNELS: tl.constexpr,
               TAPS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, blocks of channels)."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, second = columns < CHANNELS, mixed + 2 * CHANNELS
    sequence = _sequence_of(row, offsets, sequences, SEQUENCES)
    if sequence < sequences:
        begin, text = tl.load(offsets + sequence), _is_text(sequence, is_text, TREES, TEXTS)
        word = tl.load(words + row) if TREES else tl.zeros([], tl.int64)
        own, fresh, page = row - begin, tl.load(lengths + sequence) == 0, tl.load(pages + sequence * 3)
        total = _convolved(mixed, second, weights, tails, page, fresh, begin, own, word, text, columns, inside,
                           CHANNELS, 3 * CHANNELS, TAPS, True, BLOCK)  # fmt: skip
        line = row.to(tl.int64) * 3 * CHANNELS + columns
        out = total * tl.load(mixed + line + CHANNELS, inside, 0.0)
        tl.store(done + row.to(tl.int64) * CHANNELS + columns, out.to(done.dtype.element_ty), inside)
        raw = tl.load(mixed + line, inside, 0.0) * tl.load(second + line, inside, 0.0)
        node = own - tl.where(text, tl.load(nodes + sequence), 0)
        record = (sequence * _WORD + tl.maximum(node, 0)).to(tl.int64)
        tl.store(kept + record * CHANNELS + columns, raw, inside & (node >= 0))
        _keep(raw, mixed, second, tails, page, fresh, begin, own, text, stops + sequence * 2, pages + sequence * 3,
              columns, inside, CHANNELS, 3 * CHANNELS, TAPS, True)  # fmt: skip


_PLACES = ["count", "source", "goal", "fresh", "first", "pages", "nodes"]


@triton.jit(do_not_specialize=_PLACES)
def replay_states(states, records, path, count, source, goal, fresh, first, pages, nodes, HEADS: tl.constexpr,
                  KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                  CHAINED: tl.constexpr):  # fmt: skip
    """Grid (layers, HEADS, tiles). nodes: the capacity of a layer's records."""
    wait_turn(CHAINED)
    record_width: tl.constexpr = KEYS + HEADS * WIDTH + HEADS
    size: tl.constexpr = HEADS * WIDTH * DIM
    layer, head, tile, key = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.program_id(2),
        tl.arange(0, BLOCK)[:, None],
    )
    columns = tl.arange(0, _TILE)[None, :]
    cell = ((head * (WIDTH // _TILE) + tile) * DIM + key) * _TILE + columns
    state = tl.load(states + (layer * pages + source) * size + cell, (key < DIM) & (fresh == 0), 0.0)
    for number in range(count):
        record = (layer * nodes + first + tl.load(path + number)) * record_width
        keys = tl.load(records + record + head // (HEADS * DIM // KEYS) * DIM + key, key < DIM, 0.0)
        learned = tl.load(records + record + KEYS + head * WIDTH + tile * _TILE + columns)
        state = _stepped(state, keys, learned, tl.load(records + record + KEYS + HEADS * WIDTH + head))
    tl.store(states + (layer * pages + goal) * size + cell, state, key < DIM)


@triton.jit(do_not_specialize=_PLACES)
def replay_tails(tails, kept, path, count, source, goal, fresh, first, pages, nodes, CHANNELS: tl.constexpr,
                 TAIL: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (layers, blocks of channels). Within a page rows move down, the first one first."""
    wait_turn(CHAINED)
    layer, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    before, own = (
        tails + (layer * pages + source) * (TAIL * CHANNELS),
        tails + (layer * pages + goal) * (TAIL * CHANNELS),
    )
    for place in tl.static_range(TAIL):
        number = count + place - TAIL
        node = tl.load(path + tl.maximum(number, 0), number >= 0, 0)
        new = tl.load(kept + (layer * nodes + first + node) * CHANNELS + columns, inside & (number >= 0), 0.0)
        old = tl.load(before + (number + TAIL) * CHANNELS + columns, inside & (number < 0) & (fresh == 0), 0.0)
        tl.store(own + place * CHANNELS + columns, tl.where(number >= 0, new, old), inside)
