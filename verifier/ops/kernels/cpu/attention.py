"""Attention of rows over their pages: a row meets its keys in the order of their positions, 16 at a time.

::

    places   once a pass: the slot of every position of each sequence, and of each row of a tree the slots of its path
    scores   of 16 positions together, those of a block [16 j, 16 j + 16); a lane's position is what decides its order
    weights  exp(score - largest), summed lane by lane over the blocks, then over the lanes
    values   weighted and added position by position

A key is read where its position is visible and nowhere else, so no row notices what it does not see.

Legend: S sequences, R rows, H query heads, G kv heads, D head dim, P pages of a table, N positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifier.ops.kernels.cpu import launch, threads
from verifier.ops.kernels.cpu.asm import Kernel, Variable
from verifier.ops.kernels.cpu.launch import Compiled
from verifier.ops.kernels.cpu.types import BF16, F32, I1, I32, I64, LANES, OF_TORCH, vector
from verifier.ops.kernels.cpu.values import Value
from verifier.ops.tree_attention import PagedRows

#: Nodes of a tree at most, and numbers that say of a row: its sequence, leading positions of that, nodes of its path.
_NODES, _INFO = 64, 3
#: Heads and vectors of a head whose weighted values are held at once.
_HEADS, _VECTORS = 4, 4


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows and the keys of a pass are.

    positions, own: int64[R], the position and the slot of each row; padding's are 0. slots: int32[S, N], of all
    positions that texts have. info, int32[R, 3]: a row's sequence, how many leading positions of that it sees, nodes of
    its path. paths: int32[R, 64], the slots of those.
    """

    positions: Tensor
    own: Tensor
    slots: Tensor
    info: Tensor
    paths: Tensor


def find_places(paged: PagedRows, rows: int, count: Tensor) -> Places:
    """rows: room for so many. count: int64[1], how many there are; those behind the last sequence's are padding."""
    sequences, pages = paged.tables.shape
    flat = ((rows,), (rows,))
    shapes = ((sequences, pages * paged.page_size), (rows, _INFO), (rows, _NODES))
    places = Places(
        *(launch.room(shape, torch.int64) for shape in flat), *(launch.room(shape, torch.int32) for shape in shapes)
    )
    all_texts = paged.words is None
    _finding(paged.page_size, all_texts, paged.texts is not None)(
        paged.tables, paged.lengths, paged.offsets, 0 if paged.texts is None else paged.texts,
        0 if paged.words is None else paged.words, launch.counted(paged.sequences, sequences), pages, count,
        places.positions, places.own, places.slots, places.slots.shape[1], places.info, places.paths,
    )  # fmt: skip
    return places


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Places,
    out: Tensor,
    count: Tensor,
    scale: float,
    window: int = 0,
    first: int = 0,
) -> None:
    """query, out: [R, H, D]. keys, values: [slots, G, D]. window: how many positions a row sees; 0: all."""
    groups, dim = keys.shape[-2:]
    room = places.slots.shape[1] + _NODES + 2 * LANES
    shape = (query.dtype, keys.dtype, dim, query.shape[1] // groups, groups, scale)
    scratch = launch.room((threads.MOST, query.shape[1] // groups, room), torch.float32)
    _attention(*shape)(
        query, keys, values, out, places.slots, places.slots.shape[1], places.info, places.paths, count, window, first,
        scratch, room,
    )  # fmt: skip


@Compiled
def _finding(page_size: int, all_texts: bool, some_texts: bool) -> Kernel:
    """Arguments: tables, lengths, offsets, texts, words, sequences, pages, count; what :class:`Places` has."""
    return _Finding(Kernel("find_places"), page_size, all_texts, some_texts).write()


class _Finding:
    def __init__(self, k: Kernel, page_size: int, all_texts: bool, some_texts: bool) -> None:
        self.k, self.page_size, self.all_texts, self.some_texts = k, page_size, all_texts, some_texts
        self.tables, self.lengths, self.offsets, self.texts, self.words = (k.pointer(index) for index in range(5))
        self.sequences, self.pages, self.count = k.counted(5), k.number(6), k.counted(7)
        self.positions, self.own, self.slots, self.stride = k.pointer(8), k.pointer(9), k.pointer(10), k.number(11)
        self.info, self.paths = k.pointer(12), k.pointer(13)

    def write(self) -> Kernel:
        k = self.k
        with k.loop(0, self.sequences) as sequence:
            begin, end = self._of(self.offsets, sequence), self._of(self.offsets, sequence + 1)
            length, text = self._of(self.lengths, sequence), self._is_text(sequence)
            table = k.at(self.tables, sequence * self.pages, I32)
            mine = k.at(self.slots, sequence * self.stride, I32)
            known = k.smallest(k.select(text, length + (end - begin), length), self.stride)
            with k.share(known) as position:
                k.store(k.integer(self._slot(table, position), I32), mine, position)
            with k.share(end - begin) as order:
                path, last = self._path(table, length, begin + order, text)
                base = k.select(text, length + order + 1, length)
                own = k.select(text, self._slot(table, length + order), last)
                self._tell(begin + order, (sequence, base, path), (base + path - 1, own))
        live, nothing = self._of(self.offsets, self.sequences), k.constant(0)
        with k.share(self.count - live) as padding:
            self._tell(live + padding, (nothing, nothing, nothing), (nothing, nothing))
        return k

    def _of(self, array: Value, index: Value) -> Value:
        return self.k.integer(self.k.load(array, I32, index), I64)

    def _is_text(self, sequence: Value) -> Value:
        if self.all_texts or not self.some_texts:
            return self.k.constant(int(self.all_texts), I1)
        return self._of(self.texts, sequence).differs(0)

    def _slot(self, table: Value, position: Value) -> Value:
        return self._of(table, position // self.page_size) * self.page_size + position % self.page_size

    def _path(self, table: Value, length: Value, row: Value, text: Value) -> tuple[Value, Value]:
        """Writes the slots of a node's path; returns how many, and the last one's, which is its own."""
        k = self.k
        nodes, last = k.variable(k.constant(0)), k.variable(k.constant(0))
        if not self.all_texts:
            with k.when(text.equals(0)):
                word = k.load(self.words, I64, row)
                with k.loop(0, _NODES) as node, k.when(((word >> node) & 1).differs(0)):
                    last.value = self._slot(table, length + node)
                    k.store(k.integer(last.value, I32), self.paths, row * _NODES + nodes.value)
                    nodes.value = nodes.value + 1
        return nodes.value, last.value

    def _tell(self, row: Value, info: tuple[Value, ...], place: tuple[Value, Value]) -> None:
        k = self.k
        for number, value in enumerate(info):
            k.store(k.integer(value, I32), self.info, row * _INFO + number)
        for array, value in zip((self.positions, self.own), place, strict=True):
            k.store(value, array, row)


@Compiled
def _attention(dtype: torch.dtype, stored: torch.dtype, dim: int, team: int, groups: int, scale: float) -> Kernel:
    return _Attention(Kernel("attend"), dtype, stored, dim, team, groups, scale).write()


class _Attention:
    """Writes the kernel; a unit of work is a row and a kv head, with the ``team`` of query heads that share it."""

    def __init__(
        self, k: Kernel, dtype: torch.dtype, stored: torch.dtype, dim: int, team: int, groups: int, scale: float
    ) -> None:
        self.k, self.of, self.kept = k, OF_TORCH[dtype], OF_TORCH[stored]
        self.dim, self.team, self.groups, self.scale = dim, team, groups, scale
        self.query, self.keys, self.values, self.out, self.slots = (k.pointer(index) for index in range(5))
        self.stride, self.info, self.paths, self.count = k.number(5), k.pointer(6), k.pointer(7), k.counted(8)
        self.window, self.first, self.room = k.number(9), k.number(10), k.number(12)
        self.scores = k.at(k.pointer(11), k.thread * team * self.room, F32)
        self.block = k.array(I32, LANES)  # slots of 16 positions, where they are not all of the text
        self.parts = k.array(F32, team * LANES * LANES)
        self.short = k.array(F32, LANES)  # the end of a head that is no whole vector
        self.dot = self.of is BF16 and self.kept is BF16 and dim % (2 * LANES) == 0 and k.processor.multiplies_bf16

    def write(self) -> Kernel:
        k = self.k
        with k.share(self.count * self.groups) as unit:
            self.row, self.head = unit // self.groups, unit % self.groups
            sequence, self.base, path = (self._told(place) for place in range(_INFO))
            self.text = k.at(self.slots, sequence * self.stride, I32)
            self.path = k.at(self.paths, self.row * _NODES, I32)
            self.end = self.base + path
            behind = k.select(self.window.equals(0), self.first, self.end - self.window)
            self.begin = k.select(behind > self.first, behind, self.first)
            self.from_block = self.begin // LANES * LANES
            largest = self._scored()
            totals = self._weighted(largest)
            for head in range(0, self.team, _HEADS):
                self._mixed(range(head, min(head + _HEADS, self.team)), totals)
        return k

    def _told(self, place: int) -> Value:
        return self.k.integer(self.k.load(self.info, I32, self.row * _INFO + place), I64)

    def _key(self, array: Value, slot: Value) -> Value:
        """Where a slot's key or value begins."""
        return self.k.at(array, (self.k.integer(slot, I64) * self.groups + self.head) * self.dim, self.kept)

    def _query(self, head: int) -> Value:
        return self.k.at(self.query, ((self.row * self.groups + self.head) * self.team + head) * self.dim, self.of)

    # -- scores -----------------------------------------------------------------------------------------------------

    def _scored(self) -> list[Variable]:
        """The scores of all positions; returns for each head its largest, lane by lane."""
        k = self.k
        largest = [k.variable(k.constant(float("-inf"), vector(F32))) for _ in range(self.team)]
        with k.loop(self.from_block, self.end, LANES) as begin:
            slots = self._block(begin)
            with k.loop(0, LANES) as lane:
                self._multiplied(self._key(self.keys, k.load(slots, I32, lane)), lane)
            positions = k.spread(k.integer(begin, I32)) + k.places(range(LANES))
            seen = (positions >= k.integer(self.begin, I32)) & (positions < k.integer(self.end, I32))
            for head in range(self.team):
                parts = [k.load(self.parts, vector(F32), (head * LANES + lane) * LANES) for lane in range(LANES)]
                score = k.select(seen, k.sums(parts) * self.scale, float("-inf"))
                k.store(score, self.scores, self.room * head + begin)
                largest[head].value = k.largest(largest[head].value, score)
        return largest

    def _block(self, begin: Value) -> Value:
        """Where the slots of 16 positions stand; of positions behind the end the last one's."""
        k = self.k
        whole = begin + LANES <= self.base
        with k.when(whole.equals(0)), k.loop(0, LANES) as lane:
            last = self.end - 1
            position = k.smallest(begin + lane, last)
            of_path = position >= self.base
            source = k.select(of_path, self.path, self.text)
            k.store(k.load(source, I32, position - k.select(of_path, self.base, 0)), self.block, lane)
        return k.select(whole, k.at(self.text, begin, I32), self.block)

    def _multiplied(self, key: Value, lane: Value) -> None:
        """What each lane of a vector adds to the score of one position, for every head."""
        k, step = self.k, self._step()
        totals: list[Value] = [k.constant(0.0, vector(F32))] * self.team
        for at in range(0, self.dim, step):
            line = self._lines(key, self.kept, at)
            for head in range(self.team):
                totals[head] = self._added(totals[head], self._lines(self._query(head), self.of, at), line)
        for head, total in enumerate(totals):
            k.store(total, self.parts, (lane + head * LANES) * LANES)

    def _step(self) -> int:
        return 2 * LANES if self.dot else LANES

    def _lines(self, row: Value, of: Any, at: int) -> Value:
        """Numbers of a query or a key from ``at`` on: pairs of bf16, or fp32."""
        return self.k.load(row, vector(BF16, 2 * LANES), at) if self.dot else self._read(row, of, at)

    def _read(self, row: Value, of: Any, at: int) -> Value:
        """A vector of a head from ``at`` on, as fp32, with zeros behind its end."""
        k = self.k
        if at + LANES <= self.dim:
            return k.read(row, of, at)
        k.store(k.constant(0.0, vector(F32)), self.short)
        with k.loop(at, self.dim) as index:
            k.store(k.widened(k.load(row, of, index)), self.short, index - at)
        return k.load(self.short, vector(F32))

    def _added(self, total: Value, query: Value, key: Value) -> Value:
        if self.dot:
            return self.k.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, query, key)
        return self.k.fma(query, key, total)

    # -- weights and values -----------------------------------------------------------------------------------------

    def _weighted(self, largest: list[Variable]) -> list[Value]:
        """Scores become weights; returns their sums."""
        k = self.k
        tops = [k.spread(k.folded(top.value, k.largest)) for top in largest]
        sums = [k.variable(k.constant(0.0, vector(F32))) for _ in range(self.team)]
        with k.loop(self.from_block, self.end, LANES) as begin:
            for head, (top, total) in enumerate(zip(tops, sums, strict=True)):
                weight = k.exp(k.load(self.scores, vector(F32), self.room * head + begin) - top)
                k.store(weight, self.scores, self.room * head + begin)
                total.value = total.value + weight
        return [k.total(total.value) for total in sums]

    def _mixed(self, heads: range, totals: list[Value]) -> None:
        """The weighted values of some heads, some vectors at a time."""
        step = LANES * _VECTORS
        for at in range(0, self.dim, step):
            self._mixed_vectors(heads, range(at, min(at + step, self.dim), LANES), totals)

    def _mixed_vectors(self, heads: range, vectors: range, totals: list[Value]) -> None:
        k = self.k
        sums = [[k.variable(k.constant(0.0, vector(F32))) for _ in vectors] for _ in heads]
        for source, begin, end, shift in self._stretches():
            with k.loop(begin, end) as position:
                value = self._key(self.values, k.load(source, I32, position - shift))
                lines = [self._read(value, self.kept, at) for at in vectors]
                for head, mine in zip(heads, sums, strict=True):
                    weight = k.spread(k.load(self.scores, F32, self.room * head + position))
                    for line, total in zip(lines, mine, strict=True):
                        total.value = k.fma(weight, line, total.value)
        for head, mine in zip(heads, sums, strict=True):
            out = k.at(self.out, ((self.row * self.groups + self.head) * self.team + head) * self.dim, self.of)
            for at, total in zip(vectors, mine, strict=True):
                self._finish(k.select(self.begin < self.end, total.value / totals[head], 0.0), out, at)

    def _stretches(self) -> list[tuple[Value, Value, Value, Value]]:
        """Positions in order: where their slots stand, the first and the end, and what to take off a position there."""
        k, base = self.k, self.base
        text = (self.text, self.begin, base, k.constant(0))
        return [text, (self.path, k.select(self.begin > base, self.begin, base), self.end, base)]

    def _finish(self, value: Value, out: Value, at: int) -> None:
        """Write a vector of a head, as far as it goes."""
        k = self.k
        if at + LANES <= self.dim:
            k.write(value, out, self.of, at)
            return
        k.store(value, self.short)
        with k.loop(at, self.dim) as index:
            k.store(k.narrowed(k.load(self.short, F32, index - at), self.of), out, index)
