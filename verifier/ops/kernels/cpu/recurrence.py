"""What remembers in :mod:`foresay.verifier.ops.recurrence`, for a CPU.

::

    remember    head by head and 16 values at a time, row by row: update the state and multiply it by the query; the
                state of that part, ``D`` vectors of 16, stays in the first-level cache
    replay      the same, from records, without queries

Sums over keys run in four chains, each in order, then (0 + 1) + (2 + 3). A node continues from the state of its parent:
each thread keeps a state part for each node of one tree. The bits do not depend on the other rows and sequences, or on
which thread has which heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from foresay.kvpaging.states import NODES, LayerStates
from foresay.verifier.ops.kernels.cpu import threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled, arena, counted
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import StateRows

_VECTOR, _EPS, _CHAINS = vector(F32), 1e-6, 4


def remember(
    made: Tensor, gains: Tensor, skip: Tensor, layer: LayerStates, rows: StateRows, out: Tensor, scans: bool
) -> None:
    """Write the output of each row's heads, the states of texts and the records of nodes. made: [R, C], after the
    convolution. gains: [R, 2 H], shares and decays. skip: [H], read if it ``scans``."""
    (heads, tiles, dim, _), paged, channels = layer.states.shape[1:], rows.metadata, made.shape[1]
    assert paged.words is not None and paged.is_prefill is not None, "as a step writes them"
    own, values = arena((threads.MOST, (NODES + 1) * dim * LANES), torch.float32), heads * tiles * LANES
    _remembering(heads, (channels - values) // 2, dim, values, scans)(
        made, gains, layer.states, layer.records, paged.offsets, paged.lengths, paged.words, paged.is_prefill,
        rows.pages, rows.stops, rows.nodes, out, own, counted(paged.sequences, len(paged.lengths)), skip,
    )  # fmt: skip


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
