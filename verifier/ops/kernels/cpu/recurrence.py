"""The ops of :mod:`foresay.verifier.ops.recurrence`, for a CPU.

::

    convolve    row by row: the convolution, keys and queries of length 1 (Mamba-2's unchanged), shares and decays;
                and the records of nodes
    remember    head by head and 16 values at a time, row by row: update the state and multiply it by the query; the
                state of that part, ``D`` vectors of 16, stays in the first-level cache
    finish      row by row and head by head, or part by part: the norm, and the gate, after it or before
    replay      as remember, from records, without queries
    short       row by row: a convolution by itself, of the gated input

Sums over keys run in four chains, each in order, then (0 + 1) + (2 + 3). A node continues from the state of its parent:
each thread keeps a state part for each node of one tree. The bits do not depend on the other rows and sequences, or on
which thread has which heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from foresay.kvpaging.states import NODES, LayerStates
from foresay.verifier.ops.attention import plan_attention
from foresay.verifier.ops.kernels.cpu import threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled, counted, room, zeros
from foresay.verifier.ops.kernels.cpu.units import INFO
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I32, I64, LANES, OF_TORCH, Value, vector
from foresay.verifier.ops.records import DeltaWeights, StateRows

_VECTOR, _EPS, _CHAINS = vector(F32), 1e-6, 4


def gated_delta(
    mixed: Tensor,
    rates: Tensor,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
) -> Tensor:
    """As the op of this name."""
    (heads, tiles, dim, _), (taps, channels) = layer.states.shape[1:], weights.taps.shape
    values, paged, count, number = heads * tiles * LANES, rows.paged, rows.count, len(mixed)
    keys = (channels - values) // 2
    assert paged.words is not None and paged.is_prefill is not None, "as a step writes them"
    made, gains = (room((number, width), torch.float32) for width in (channels, 2 * heads))
    out, done = room((number, values), torch.float32), room((number, values), dtype)
    plan, text = plan_attention(paged, number, count), (paged.offsets, paged.lengths, paged.words, paged.is_prefill)
    states = rows.pages, rows.stops, rows.nodes
    nothing, scan = zeros(channels, torch.float32), weights.scan
    bias, skip, parts = (nothing, nothing, heads) if scan is None else (scan.bias, scan.skip, scan.parts)
    _convolving(heads, keys, dim, values, taps, scan is not None)(
        mixed, rates, weights.taps, weights.decay, weights.shift, layer.tails, layer.records, layer.rows,
        nothing, plan.info, *text, *states, made, gains, counted(count, number), bias,
    )  # fmt: skip
    own = room((threads.MOST, (NODES + 1) * dim * LANES), torch.float32)
    _remembering(heads, keys, dim, values, scan is not None)(
        made, gains, layer.states, layer.records, *text, *states, out, own,
        counted(paged.sequences, len(paged.lengths)), skip,
    )  # fmt: skip
    shared = heads // (keys // dim) if weights.tiled else 1
    _finishing(parts, channels, values, shared, weights.eps, dtype, scan is not None)(
        out, mixed, weights.norm, done, counted(count, number)
    )
    return done


def short_conv(
    mixed: Tensor,
    taps: Tensor,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
) -> Tensor:
    """As the op of this name."""
    (number, channels), paged, count = taps.shape, rows.paged, rows.count
    assert paged.words is not None and paged.is_prefill is not None, "as a step writes them"
    let_in, done = room((len(mixed), channels), torch.float32), room((len(mixed), channels), dtype)
    plan, text = plan_attention(paged, len(mixed), count), (paged.offsets, paged.lengths, paged.words, paged.is_prefill)
    _letting_in(channels)(mixed, let_in, counted(count, len(mixed)))
    _short(channels, number, dtype)(
        let_in, taps, layer.tails, layer.rows, zeros(channels, torch.float32), plan.info, *text, rows.pages,
        rows.stops, rows.nodes, mixed, done, counted(count, len(mixed)),
    )  # fmt: skip
    return done


def replay(layers: LayerStates, source: int, destination: int, fresh: bool, sequence: int, path: Tensor) -> None:
    """As the op of this name."""
    (_, pages, heads, tiles, dim, _), (_, _, tail, channels) = layers.states.shape, layers.tails.shape
    values = heads * tiles * LANES
    _replaying(heads, (channels - values) // 2 if heads else channels, dim, values, tail)(
        *layers, path, len(path), source, destination, int(fresh), sequence * NODES, pages, len(layers.states),
        layers.rows.shape[1],
    )  # fmt: skip


class _PassRow:
    """A sequence of a pass: its first row, whether it is a text, whether it is at its beginning; and data of its
    rows."""

    def __init__(self, k: Kernel, first: int, sequence: Value) -> None:
        self.k, self._words = k, k.pointer(first + 2)
        offsets, lengths, texts, pages, stops, nodes = (k.pointer(first + at) for at in (0, 1, 3, 4, 5, 6))
        self.begin, self.end = self._info_of(offsets, sequence), self._info_of(offsets, sequence + 1)
        self.fresh = self._info_of(lengths, sequence).equals(0)
        self.text = self._info_of(texts, sequence).differs(0)
        self.source = self._info_of(pages, sequence * 3)
        self.stops = [
            (self._info_of(stops, sequence * 2 + at), self._info_of(pages, sequence * 3 + 1 + at)) for at in range(2)
        ]
        self._nodes, self._record = self._info_of(nodes, sequence), sequence * NODES

    def _info_of(self, array: Value, index: Value) -> Value:
        return self.k.integer(self.k.load(array, I32, index), I64)

    def word(self, row: Value) -> Value:
        """The ancestor word of a tree's row, without its own bit."""
        word = self.k.load(self._words, I64, row)
        top = self.top(word)
        return word ^ (self.k.constant(1) << self.k.select(top < 0, self.k.constant(0), top))

    def top(self, word: Value) -> Value:
        """The last node of a word; -1 if it has none."""
        return self.k.constant(63) - self.k.call("llvm.ctlz.i64", I64, word, self.k.constant(0, I1))

    def node(self, row: Value) -> Value:
        """The node of a row; negative if it is none."""
        return self.k.select(self.text, row - self.begin - self._nodes, self.top(self.k.load(self._words, I64, row)))

    def record(self, row: Value) -> Value:
        """The offset of a node's record."""
        return self._record + self.node(row)


class _Window:
    """The input rows of a row's convolution: those before it on its path, in the pass or in the tail that the sequence
    continues from. raw: the rows, ``stride`` numbers apart; nothing: a row of zeros."""

    def __init__(
        self, k: Kernel, it: _PassRow, raw: Value, tails: Value, nothing: Value, channels: int, taps: int, stride: int
    ) -> None:
        self.k, self.it, self._raw, self._tails, self._nothing = k, it, raw, tails, nothing
        self.channels, self.taps, self.stride = channels, taps, stride

    def _tail(self, at: Value) -> Value:
        """A row of the tail."""
        kept = self.k.at(self._tails, (self.it.source * (self.taps - 1) + at) * self.channels, F32)
        return self.k.select(self.it.fresh, self._nothing, kept)

    def rows(self, row: Value) -> list[Value]:
        """Their addresses, the row's own last."""
        k, it = self.k, self.it
        word, missing = k.variable(k.select(it.text, 0, it.word(row))), k.variable(k.constant(0))
        window = [k.at(self._raw, row * self.stride, F32)]
        for back in range(1, self.taps):
            above = k.select(it.text, row - it.begin - back, it.top(word.value))
            missing.value = missing.value + k.select(above < 0, k.constant(1), k.constant(0))
            before = k.select(above < 0, k.constant(0), it.begin + above)
            inside = k.at(self._raw, before * self.stride, F32)
            window.append(k.select(above < 0, self._tail(k.constant(self.taps - 1) - missing.value), inside))
            bit = k.constant(1) << k.select(above < 0, k.constant(0), above)
            word.value = k.select(it.text | (above < 0), word.value, word.value ^ bit)
        return window[::-1]

    def keep(self, row: Value, own: Value) -> None:
        """Copy a row to the tails of stops, and with the first row what remains of the tail before."""
        k, order, taps, channels = self.k, row - self.it.begin, self.taps, self.channels
        for rows, page in self.it.stops:
            with k.when(self.it.text & (order < rows)):
                first = order - rows + (taps - 1)  # the row's index in the tail
                goal = k.at(self._tails, page * ((taps - 1) * channels), F32)
                with k.when(first >= 0):
                    k.copy(own, k.at(goal, first * channels, F32), channels * 4)
                with k.when(order.equals(0)), k.loop(0, k.constant(taps - 1) - rows) as at:
                    k.copy(self._tail(at + rows), k.at(goal, at * channels, F32), channels * 4)


def _convolved(
    k: Kernel, weights: Value, window: Sequence[Value], at: Value, channels: int, bias: Value | None = None
) -> Value:
    """16 channels of a row."""
    total = k.constant(0.0, _VECTOR) if bias is None else k.load(bias, _VECTOR, at)
    for tap, row in enumerate(window):
        total = k.fma(k.load(weights, _VECTOR, at + tap * channels), k.load(row, _VECTOR, at), total)
    return total


@Compiled
def _convolving(heads: int, keys: int, dim: int, values: int, taps: int, scans: bool) -> Kernel:
    k, channels = Kernel("convolve"), 2 * keys + values
    mixed, rates, weights, decay, shift, tails, records, kept, nothing, info = (k.pointer(at) for at in range(10))
    made, gains, bias = k.pointer(17), k.pointer(18), k.pointer(20) if scans else None
    with k.share(k.counted(19)) as row:
        it = _PassRow(k, 10, k.integer(k.load(info, I32, row * INFO), I64))
        windows = _Window(k, it, mixed, tails, nothing, channels, taps, channels + values)
        window = windows.rows(row)
        own = window[-1]
        line = k.at(made, row * channels, F32)
        with k.loop(0, channels, LANES) as at:
            k.store(_silu(k, _convolved(k, weights, window, at, channels, bias)), line, at)
        with k.loop(0, 0 if scans else 2 * keys, dim) as head:
            _normalize(
                k,
                k.at(line, head, F32),
                dim,
                k.select(head < keys, k.constant(1 / math.sqrt(dim), F32), k.constant(1.0, F32)),
            )
        mine = k.at(gains, row * 2 * heads, F32)

        def gain(at: Value, lanes: int) -> None:
            of = F32 if lanes == 1 else _VECTOR
            rates_of = 1 if scans else 2
            gate, forget = (
                k.load(rates, of, row * rates_of * heads + first + at) for first in (0, (rates_of - 1) * heads)
            )
            step = _softplus(k, forget + k.load(shift, of, at))
            k.store(step if scans else _sigmoid(k, gate), mine, at)
            k.store(k.exp(k.load(decay, of, at) * step), mine, at + heads)

        k.across(heads, gain)
        with k.when(it.node(row) >= 0):
            record = k.at(records, it.record(row) * (keys + values + heads), F32)
            k.copy(k.at(line, keys, F32), record, keys * 4)
            k.copy(k.at(mine, heads, F32), k.at(record, keys + values, F32), heads * 4)
            k.copy(own, k.at(kept, it.record(row) * channels, F32), channels * 4)
        windows.keep(row, own)
    return k


@Compiled
def _letting_in(channels: int) -> Kernel:
    k = Kernel("let in")
    mixed, let_in = k.pointer(0), k.pointer(1)
    with k.share(k.counted(2)) as row, k.loop(0, channels, LANES) as at:
        first, last = (k.load(mixed, _VECTOR, row * 3 * channels + begin + at) for begin in (0, 2 * channels))
        k.store(first * last, let_in, row * channels + at)
    return k


@Compiled
def _short(channels: int, taps: int, dtype: torch.dtype) -> Kernel:
    k = Kernel("short convolution")
    let_in, weights, tails, kept, nothing, info = (k.pointer(at) for at in range(6))
    mixed, done = k.pointer(13), k.pointer(14)
    with k.share(k.counted(15)) as row:
        it = _PassRow(k, 6, k.integer(k.load(info, I32, row * INFO), I64))
        windows = _Window(k, it, let_in, tails, nothing, channels, taps, channels)
        window = windows.rows(row)
        with k.loop(0, channels, LANES) as at:
            out = k.load(mixed, _VECTOR, row * 3 * channels + channels + at)
            out = out * _convolved(k, weights, window, at, channels)
            k.store(k.narrowed(out, OF_TORCH[dtype]), done, row * channels + at)
        with k.when(it.node(row) >= 0):
            k.copy(window[-1], k.at(kept, it.record(row) * channels, F32), channels * 4)
        windows.keep(row, window[-1])
    return k


def _sigmoid(k: Kernel, value: Value) -> Value:
    return k.constant(1.0, value.type) / (k.exp(value * -1.0) + 1.0)


def _silu(k: Kernel, value: Value) -> Value:
    return value / (k.exp(value * -1.0) + 1.0)


def _softplus(k: Kernel, value: Value) -> Value:
    """``log(1 + e^x)``, accurate for small results."""
    size = k.select(value < 0.0, value * -1.0, value)
    small = k.exp(size * -1.0)
    more = small + 1.0
    near = k.select(more.differs(1.0), k.log(more) * (small / (more - 1.0)), small)
    return k.select(value > 0.0, value, 0.0) + near


def _normalize(k: Kernel, line: Value, dim: int, scale: Value) -> None:
    """Divide a vector by its length, and multiply it."""
    total = k.variable(k.constant(0.0, _VECTOR))
    with k.loop(0, dim, LANES) as at:
        value = k.load(line, _VECTOR, at)
        total.value = k.fma(value, value, total.value)
    factor = k.spread(scale / k.sqrt(k.total(total.value) + _EPS))
    with k.loop(0, dim, LANES) as at:
        k.store(k.load(line, _VECTOR, at) * factor, line, at)


class _Head:
    """Emits steps of 16 values of a head: ``dim`` vectors of state."""

    def __init__(self, k: Kernel, dim: int) -> None:
        self.k, self.dim = k, dim

    def summed(self, term: Callable[[Value], tuple[Value, Value]]) -> Value:
        """The sum of products over keys. term: the two factors for a key's index."""
        k = self.k
        sums = [k.variable(k.constant(0.0, _VECTOR)) for _ in range(_CHAINS)]
        with k.loop(0, self.dim, _CHAINS) as first:
            for chain, total in enumerate(sums):
                total.value = k.fma(*term(first + chain), total.value)
        first, second, third, fourth = (total.value for total in sums)
        return (first + second) + (third + fourth)

    def remembered(self, source: Value, keys: Value, decay: Value) -> Value:
        """The decayed state's value for a key."""
        k = self.k
        return self.summed(lambda at: (k.spread(k.load(keys, F32, at)), self._decayed(source, decay, at)))

    def stepped(self, source: Value, goal: Value, keys: Value, decay: Value, learned: Value, at: Value) -> Value:
        """One of the state's vectors after a row, which is stored."""
        k = self.k
        new = k.fma(k.spread(k.load(keys, F32, at)), learned, self._decayed(source, decay, at))
        k.store(new, goal, at * LANES)
        return new

    def _decayed(self, source: Value, decay: Value, at: Value) -> Value:
        return self.k.load(source, _VECTOR, at * LANES) * decay

    def copy(self, source: Value, goal: Value) -> None:
        self.k.copy(source, goal, self.dim * LANES * 4)

    def begin(self, source: Value, goal: Value, fresh: Value) -> None:
        """A copy of a state, or zeros."""
        k = self.k
        with k.loop(0, self.dim * LANES, LANES) as at:
            k.store(k.select(fresh, k.constant(0.0, _VECTOR), k.load(source, _VECTOR, at)), goal, at)


@Compiled
def _remembering(heads: int, keys: int, dim: int, values: int, scans: bool) -> Kernel:
    k, tiles, size = Kernel("remember"), values // heads // LANES, dim * LANES
    made, gains, states, records = (k.pointer(at) for at in range(4))
    out, scratch = k.pointer(11), k.at(k.pointer(12), k.thread * ((NODES + 1) * size), F32)
    skip = k.pointer(14)
    step, whole, shared = _Head(k, dim), heads * tiles, heads // (keys // dim)
    with k.share(k.counted(13) * whole) as unit:
        it, part = _PassRow(k, 4, unit // whole), unit % whole
        head, first = part // tiles, k.at(scratch, NODES * size, F32)
        step.begin(k.at(states, (it.source * whole + part) * size, F32), first, it.fresh)
        with k.loop(it.begin, it.end) as row:
            above, own = it.top(it.word(row)), it.node(row)
            source = k.at(scratch, k.select(it.text | (above < 0), k.constant(NODES), above) * size, F32)
            goal = k.at(scratch, k.select(it.text, k.constant(NODES), own) * size, F32)
            line = k.at(made, row * (2 * keys + values), F32)
            query, key = (k.at(line, head // shared * dim + begin, F32) for begin in (0, keys))
            share, decay = (k.spread(k.load(gains, F32, row * 2 * heads + begin + head)) for begin in (0, heads))
            value = k.load(line, _VECTOR, part * LANES + 2 * keys)
            learned = (value if scans else value - step.remembered(source, key, decay)) * share
            made_of = partial(step.stepped, source, goal, key, decay, learned)
            read = step.summed(lambda at, query=query, new=made_of: (k.spread(k.load(query, F32, at)), new(at)))  # type: ignore[misc]
            read = k.fma(k.spread(k.load(skip, F32, head)), value, read) if scans else read
            k.store(read, out, row * values + part * LANES)
            with k.when(own >= 0):
                k.store(learned, records, it.record(row) * (keys + values + heads) + keys + part * LANES)
            for rows, page in it.stops:
                with k.when(it.text & (row - it.begin + 1).equals(rows)):
                    step.copy(goal, k.at(states, (page * whole + part) * size, F32))
    return k


@Compiled
def _finishing(
    heads: int, channels: int, values: int, shared: int, eps: float, dtype: torch.dtype, scans: bool
) -> Kernel:
    """heads: how many parts of a row are normalised, each by itself: heads, or Mamba-2's parts."""
    k, width, of = Kernel("finish"), values // heads, OF_TORCH[dtype]
    out, mixed, norm, done = (k.pointer(at) for at in range(4))
    with k.share(k.counted(4) * heads) as unit:
        row, head = unit // heads, unit % heads
        line, total = k.at(out, unit * width, F32), k.variable(k.constant(0.0, _VECTOR))
        goal = (row * heads + head % shared * (heads // shared) + head // shared) * width
        gates = k.at(mixed, row * (channels + values) + channels + head * width, F32)
        with k.loop(0, width, LANES) as at:
            value = k.load(line, _VECTOR, at)
            if scans:
                value = value * _silu(k, k.load(gates, _VECTOR, at))
                k.store(value, line, at)
            total.value = k.fma(value, value, total.value)
        mean = k.total(total.value) * (1.0 / width) + eps
        factor = k.spread(k.constant(1.0, F32) / k.sqrt(mean))
        with k.loop(0, width, LANES) as at:
            value = k.load(line, _VECTOR, at) * factor * k.load(norm, _VECTOR, head * width + at if scans else at)
            value = value if scans else value * _silu(k, k.load(gates, _VECTOR, at))
            k.store(k.narrowed(value, of), done, goal + at)
    return k


@Compiled
def _replaying(heads: int, keys: int, dim: int, values: int, tail: int) -> Kernel:
    k, channels = Kernel("replay"), 2 * keys + values if heads else keys
    states, tails, records, kept, path = (k.pointer(at) for at in range(5))
    count, source, goal, fresh, first, pages, layers, room_of = (k.number(at) for at in range(5, 13))
    is_fresh = fresh.differs(0)
    if heads:
        step, tiles, size = _Head(k, dim), values // heads // LANES, dim * LANES
        whole, shared, width = heads * tiles, heads // (keys // dim), keys + values + heads
        with k.share(layers * whole) as unit:
            layer, part = unit // whole, unit % whole
            before, own = (k.at(states, ((layer * pages + page) * whole + part) * size, F32) for page in (source, goal))
            with k.when(is_fresh | source.differs(goal)):
                step.begin(before, own, is_fresh)
            with k.loop(0, count) as number:
                record = k.at(records, (layer * room_of + first + k.load(path, I64, number)) * width, F32)
                decay = k.spread(k.load(record, F32, part // tiles + (keys + values)))
                learned = k.load(record, _VECTOR, part * LANES + keys)
                key = k.at(record, part // tiles // shared * dim, F32)
                with k.loop(0, dim) as at:
                    step.stepped(own, own, key, decay, learned, at)
    with k.share(layers * (channels // LANES)) as unit:
        layer, at = unit // (channels // LANES), unit % (channels // LANES) * LANES
        before, own = (k.at(tails, (layer * pages + page) * (tail * channels), F32) for page in (source, goal))
        for index in range(tail):
            number = count + (index - tail)
            with k.when(number >= 0):
                node = k.load(path, I64, number)
                k.store(
                    k.load(kept, _VECTOR, (layer * room_of + first + node) * channels + at), own, at + index * channels
                )
            with k.when(number < 0):
                old = k.load(before, _VECTOR, (number + tail) * channels + at)
                k.store(k.select(is_fresh, k.constant(0.0, _VECTOR), old), own, at + index * channels)
    return k
