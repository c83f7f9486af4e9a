"""What follows a sample, as entries of a recording: the accepted paths and their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import launch, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.types import I64
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import NO_NODE, AcceptedPaths

#: Nodes of a tree at most.
_NODES = 64


def accept_paths(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, sampled: Tensor, nodes: Tensor, slots: Tensor
) -> AcceptedPaths:
    """As :func:`foresay.verifier.ops.accept.accept_paths`."""
    sequences, width = tokens.shape
    assert width <= _NODES, "a tree holds at most 64 nodes"
    shapes = ((sequences,), *[(sequences, width)] * 3)
    found = AcceptedPaths(*(launch.room(shape, torch.int64) for shape in shapes))
    results = (found.lengths, found.paths, found.emitted, found.sources)
    _accepting()(tokens, parents, ancestors, sampled, nodes, slots, *results, sequences, width)
    return found


def move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """As :func:`foresay.verifier.ops.move.move_paths`."""
    for store in parts:
        layers, slots = store.shape[:2]
        size = store[0, 0].numel() * store.element_size()
        if size:
            room = launch.room((threads.MOST, _NODES * size), torch.uint8)
            _moving()(store, sources, destinations, lengths, room, layers, slots, size, *sources.shape)


@Compiled
def _accepting() -> Kernel:
    return _Accepter(Kernel("accept_paths")).write()


class _Accepter:
    """The words of spec/accept.py: bit i of ``match`` says that token i is the sample at its parent."""

    def __init__(self, k: Kernel) -> None:
        self.k = k
        self.tokens, self.parents, self.ancestors, self.sampled, self.nodes, self.slots = (
            k.pointer(index) for index in range(6)
        )
        self.lengths, self.paths, self.emitted, self.sources = (k.pointer(index) for index in range(6, 10))
        self.width = k.number(11)

    def write(self) -> Kernel:
        k = self.k
        with k.share(k.number(10)) as sequence:
            first, count = sequence * self.width, k.load(self.nodes, I64, sequence)
            word = self._deepest(first, count, self._matched(first, count))
            length = k.variable(k.constant(0))
            with k.loop(0, count) as node, k.when((word >> node & 1).differs(0)):
                self._take(first + length.value, (node, first + node))
                length.value = length.value + 1
            k.store(length.value, self.lengths, sequence)
            with k.loop(length.value, self.width) as place:
                for out, nothing in ((self.paths, NO_NODE), (self.emitted, NO_NODE), (self.sources, NO_NODE)):
                    k.store(k.constant(nothing), out, first + place)
        return k

    def _matched(self, first: Value, count: Value) -> Value:
        k = self.k
        match = k.variable(k.constant(1))
        with k.loop(1, count) as node:
            at_parent = k.load(self.sampled, I64, first + k.load(self.parents, I64, first + node))
            bit = k.constant(1) << node
            hit = k.load(self.tokens, I64, first + node).equals(at_parent)
            match.value = match.value | k.select(hit, bit, 0)
        return match.value

    def _deepest(self, first: Value, count: Value, match: Value) -> Value:
        """The word with the most nodes of those whose nodes all matched, the first of them."""
        k = self.k
        best, most = k.variable(k.constant(0)), k.variable(k.constant(0))
        with k.loop(0, count) as node:
            word = k.load(self.ancestors, I64, first + node)
            nodes = k.call("llvm.ctpop.i64", I64, word)
            better = (word & (match ^ -1)).equals(0) & (nodes > most.value)
            best.value, most.value = k.select(better, word, best.value), k.select(better, nodes, most.value)
        return best.value

    def _take(self, place: Value, node: tuple[Value, Value]) -> None:
        k, (number, at) = self.k, node
        k.store(number, self.paths, place)
        k.store(k.load(self.sampled, I64, at), self.emitted, place)
        k.store(k.load(self.slots, I64, at), self.sources, place)


@Compiled
def _moving() -> Kernel:
    """A layer of a sequence: all rows are read, then written."""
    k = Kernel("move_paths")
    store, sources, destinations, lengths, room = (k.pointer(index) for index in range(5))
    layers, slots, size, sequences, width = (k.number(index) for index in range(5, 10))
    mine = k.bytes_at(room, k.thread * size * _NODES)
    with k.share(layers * sequences) as unit:
        layer, sequence = k.bytes_at(store, unit // sequences * slots * size), unit % sequences
        count = _moved(k, (sources, destinations), sequence * width, k.load(lengths, I64, sequence))
        with k.loop(0, count) as row:
            source = k.load(sources, I64, sequence * width + row)
            k.copy(k.bytes_at(layer, source * size), k.bytes_at(mine, row * size), size)
        with k.loop(0, count) as row:
            destination = k.load(destinations, I64, sequence * width + row)
            k.copy(k.bytes_at(mine, row * size), k.bytes_at(layer, destination * size), size)
    return k


def _moved(k: Kernel, ends: tuple[Value, Value], first: Value, count: Value) -> Value:
    """How many of the first rows there are to be moved: none if all are in place, as those of a chain are."""
    sources, destinations = ends
    moved = k.variable(k.constant(0))
    with k.loop(0, count) as row:
        source, destination = (k.load(each, I64, first + row) for each in (sources, destinations))
        moved.value = k.select(source.differs(destination), count, moved.value)
    return moved.value
