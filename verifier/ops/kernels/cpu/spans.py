"""Products of several queries with a span's keys and values, which are rearranged once for all of them.

::

    keys     of 16 positions, transposed: [D / 2][16][2] if pairs of bf16 are multiplied, else [D][16] of fp32; a
             score's terms run over D in order, even and odd ones in separate sums if their number is even
    values   [positions / 2][D][2], or [positions][D] of fp32; added position by position, or pair by pair

Queries are processed up to six at a time, and blocks of 16 positions two at a time if registers are wide: their sums
are in registers, and none depends on how many there are. Memory two blocks ahead is prefetched, in storage order: all
heads of a slot. Quantised rows are widened when they are rearranged, each number multiplied by its head's scale.

Legend: D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.values import BF16, BYTES, E4M3, F32, I8, I16, I32, I64, LANES, Value, vector
from foresay.verifier.ops.kernels.cpu.work_items import SPAN, part_of

T = TypeVar("T", int, Value)

#: How many blocks ahead keys and values are prefetched, and bytes of a cache line.
_AHEAD, _LINE = 2, 64
#: Bytes of values that are nearby: half of a first-level cache.
_NEAR = 1 << 14
#: The most queries that values are added to at once.
_QUERIES = 6
#: The most blocks whose scores are computed together.
_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Keys or values of a layer. scales: the address of the first slot's, if rows are quantised."""

    numbers: Value
    scales: Value | None


@dataclass(frozen=True, slots=True)
class Line:
    """A head of a slot: the address of its numbers, and its scale, if it has one."""

    numbers: Value
    scale: Value | None


@dataclass(frozen=True, slots=True)
class SpanTile:
    """Positions [low, high) of a span, and the queries that attend to them: of kv heads ``heads[0]`` to ``heads[1]`` -
    1, the ones [first, first + count) of the ``all`` queries that a head has.

    span: the position where the span begins; low is a multiple of 16. begin, end: none of them attends to positions
    outside; begins, ends: by row. apart: the number of rows, if they end within the piece one after the other; else 1.
    text, path: the addresses of the slots of positions below ``base`` and of those from there on.
    """

    heads: tuple[Value, Value]
    all: Value
    first: Value
    count: Value
    span: Value
    low: Value
    high: Value
    begin: Value
    base: Value
    end: Value
    begins: Value
    ends: Value
    apart: Value
    text: Value
    path: Value


def room_of(dim: int, heads: int, groups: int, rows: T) -> T:
    """fp32 numbers of the products' scratch memory: keys, values, and the queries and scores of ``rows`` rows."""
    width = -(-dim // LANES) * LANES
    return rows * (heads * (width + SPAN)) + (_BLOCKS * LANES + SPAN * groups) * width


class Spans:
    """Emits the products, for a kv head with a ``team`` of query heads.

    of, kept: types of the queries and of the stored rows. dims: D, and how many numbers of a value are used. scratch:
    the thread's own memory, for ``rows`` rows.
    """

    def __init__(
        self, k: Kernel, of: Any, kept: Any, dims: tuple[int, int], team: int, groups: int, scratch: Value, rows: Value
    ) -> None:
        self.k, self.of, self.kept, self.team, self.groups = k, of, kept, team, groups
        self.dim, self.value_dim = dim, _ = dims
        self.width = -(-dim // LANES) * LANES
        self.dot = of is BF16 and kept in (BF16, I8, E4M3) and dim % (2 * LANES) == 0 and k.processor.multiplies_bf16
        self.of_weights = BF16 if self.dot else F32
        self.tile, self.vectors, self.blocks = (_QUERIES, 4, _BLOCKS) if k.processor.wide else (3, 2, 1)
        self.sums = self.tile * self.vectors
        self.turned = scratch
        self.paired = k.at(self.turned, _BLOCKS * LANES * self.width, F32)
        self.queries = k.at(self.paired, SPAN * groups * self.width, F32)
        self.scores = k.at(self.queries, rows * (groups * team * self.width), F32)
        self.lane_slots = k.array(I32, _BLOCKS * LANES)  # of blocks with positions outside the text
        self.short = k.array(F32, LANES)  # the end of a head, if it is not a whole vector
        self.zeros = k.array(kept, self.width)
        for at in range(0, self.width, LANES):
            k.store(k.narrowed(k.constant(0.0, vector(F32)), kept), self.zeros, at)

    def copy_query(self, source: Value, query: Value) -> None:
        """Copy a query to the layout of the products."""
        k = self.k
        mine = self._query(query)
        if self.dot:
            k.copy(source, mine, self.dim * 2)
            return
        for at in range(0, self.dim, LANES):
            k.store(self.read(source, self.of, at), mine, at)

    def scores_of(self, query: Value) -> Value:
        """The address of a query's scores, and later its weights, which have their own type."""
        return self.k.at(self.scores, query * SPAN, F32)

    def _query(self, query: Value) -> Value:
        return self.k.at(self.queries, query * self.width, F32)

    # -- what is stored ---------------------------------------------------------------------------------------------

    def _block(self, piece: SpanTile, at: Value, number: int = 0) -> Value:
        """The address of the slots of 16 positions; a position that is not attended to gets a valid slot. number: of
        the block among those that are read together."""
        k, own = self.k, self.k.at(self.lane_slots, number * LANES, I32)
        whole = (at >= piece.begin) & (at + LANES <= piece.base)
        with k.when(whole.equals(0)), k.loop(0, LANES) as lane:
            index = at + lane
            position = k.smallest(k.select(index < piece.begin, piece.begin, index), piece.end - 1)
            of_path = position >= piece.base
            source = k.select(of_path, piece.path, piece.text)
            k.store(k.load(source, I32, position - k.select(of_path, piece.base, 0)), own, lane)
        return k.select(whole, k.at(piece.text, at, I32), own)

    def _line(self, stored: StoredKV, slots: Value, lane: Any, head: Value) -> Line:
        """A head's key or value in a slot."""
        k, slot = self.k, self.k.integer(self.k.load(slots, I32, lane), I64)
        numbers = k.at(stored.numbers, (slot * self.groups + head) * self.dim, self.kept)
        return Line(
            numbers, None if stored.scales is None else k.load(stored.scales, F32, slot * 2 * self.groups + head)
        )

    def _floats(self, line: Line, at: Any) -> Value:
        """16 numbers of a line as fp32."""
        value = self.read(line.numbers, self.kept, at)
        return value if line.scale is None else value * line.scale

    def _halves(self, line: Line, at: Any, of: Any) -> Value:
        """32 numbers of a line as bf16, seen as a vector of another type."""
        k = self.k
        if line.scale is None:
            return k.load(k.at(line.numbers, at, self.kept), of)
        return k.bits(k.narrowed(k.read(line.numbers, self.kept, at, 2 * LANES) * line.scale, BF16), of)

    def read(self, row: Value, of: Any, at: int | Value) -> Value:
        """A vector of a head from ``at`` on, as fp32, with zeros after its end."""
        k = self.k
        if isinstance(at, Value) or at + LANES <= self.dim:
            return k.read(row, of, at)
        k.store(k.constant(0.0, vector(F32)), self.short)
        with k.loop(at, self.dim) as index:
            k.store(k.widened(k.load(row, of, index)), self.short, index - at)
        return k.load(self.short, vector(F32))

    def _ask(self, stored: StoredKV, piece: SpanTile, at: Value) -> None:
        """Prefetch keys or values from ``at`` on, if the text has that many."""
        k = self.k
        with k.when(at + LANES <= k.smallest(piece.base, piece.end)):
            slots = k.at(piece.text, at, I32)
            size = self.dim * BYTES[self.kept]
            lines = [self._line(stored, slots, lane, piece.heads[0]) for lane in range(LANES)]
            with k.loop(0, (piece.heads[1] - piece.heads[0]) * size, _LINE) as index:
                for line in lines:
                    k.prefetch(k.bytes_at(line.numbers, index), near=2)

    def _arrange_keys(self, keys: StoredKV, slots: Value, head: Value, turned: Value) -> None:
        """A head's keys of 16 positions."""
        k = self.k
        lines = [self._line(keys, slots, lane, head) for lane in range(LANES)]
        with k.loop(0, self._steps() // LANES * LANES, LANES) as step:
            self._turn(lines, step, turned)
        if self._steps() % LANES:
            self._turn(lines, self._steps() // LANES * LANES, turned)

    def _steps(self) -> int:
        """Terms of a score: pairs of numbers, or numbers."""
        return self.dim // 2 if self.dot else self.dim

    def _turn(self, lines: list[Line], step: Any, turned: Value) -> None:
        k = self.k
        parts = [self._terms(line, step) for line in lines]
        for number, column in enumerate(k.turned(parts)):
            k.store(column, turned, (step + number) * LANES)

    def _terms(self, line: Line, step: Any) -> Value:
        return self._halves(line, step * 2, vector(I32)) if self.dot else self._floats(line, step)

    def _arrange_values(self, values: StoredKV, piece: SpanTile) -> None:
        """Rearrange the values of a piece; zeros for positions that are not attended to."""
        k, together = self.k, self._together()
        with k.loop(piece.low, piece.high, LANES) as at:
            self._ask(values, piece, at + LANES * _AHEAD)
            slots = self._block(piece, at)
            with k.loop(*piece.heads) as head, k.loop(0, LANES, together) as lane:
                lines = []
                for index in range(together):
                    position = at + lane + index
                    seen = (position >= piece.begin) & (position < piece.end)
                    line = self._line(values, slots, lane + index, head)
                    lines.append(Line(k.select(seen, line.numbers, self.zeros), line.scale))
                self._put(lines, self._paired(piece, head, at + lane))

    def _together(self) -> int:
        """Positions whose values are added at once."""
        return 2 if self.dot else 1

    def _paired(self, piece: SpanTile, head: Value, position: Value) -> Value:
        index = ((head - piece.heads[0]) * SPAN + (position - piece.span)) // self._together()
        return self.k.at(self.paired, index * self.width, F32)

    def _put(self, lines: list[Line], pair: Value) -> None:
        k = self.k
        if not self.dot:
            for at in range(0, self.value_dim, LANES):
                k.store(self._floats(lines[0], at), pair, at)
            return
        for at in range(0, self.value_dim, 2 * LANES):
            first, second = (self._halves(line, at, vector(I16, 2 * LANES)) for line in lines)
            for half, both in enumerate(k.zipped(first, second)):
                k.store(both, k.at(pair, at + half * LANES, F32))

    # -- products ---------------------------------------------------------------------------------------------------

    def _tiles(self, begin: Value, end: Value, most: int) -> Iterator[tuple[Value, int]]:
        """Queries, so many at a time: the first one, and how many."""
        k, even = self.k, gcd(self.team, most)
        with k.loop(begin, end, most) as first:
            left = k.smallest(end - first, most)
            for number in range(even, most + 1, even):
                with k.when(left.equals(number)):
                    yield first, number

    def score(self, keys: StoredKV, piece: SpanTile, scale: float, softcap: float | None) -> None:
        """The scores of all positions of a piece, capped if ``softcap``; minus infinity for positions that are not
        attended to."""
        k, numbers = self.k, range(self.blocks)
        turned = [k.at(self.turned, number * LANES * self.width, F32) for number in numbers]
        with k.loop(piece.low, piece.high, self.blocks * LANES) as begin:
            ats = [begin + number * LANES for number in numbers]
            for at in ats:
                self._ask(keys, piece, at + LANES * max(_AHEAD, self.blocks))
            slots = [self._block(piece, at, number) for number, at in enumerate(ats)]
            with k.loop(*piece.heads) as head:
                for those, room in zip(slots, turned, strict=True):
                    self._arrange_keys(keys, those, head, room)
                before = (head - piece.heads[0]) * piece.all
                for first, number in self._tiles(piece.first, piece.first + piece.count, self.tile):
                    for query, totals in enumerate(self._scored(before + first, number, turned)):
                        scored = [
                            total * scale if softcap is None else k.softcapped(total * scale, softcap)
                            for total in totals
                        ]
                        self._put_scores(piece, ats, scored, before, first + query)

    def _put_scores(self, piece: SpanTile, ats: list[Value], scored: list[Value], before: Value, query: Value) -> None:
        """Store a query's scores, of the blocks that are in the piece. before: queries of earlier heads."""
        k, scores = self.k, self.scores_of(before + query)
        begin, end = (k.integer(k.load(each, I64, query // self.team), I32) for each in (piece.begins, piece.ends))
        for number, (at, score) in enumerate(zip(ats, scored, strict=True)):
            positions = k.counting(at)
            with k.when(at < piece.high) if number else nullcontext():
                seen = (positions >= begin) & (positions < end)
                k.store(k.select(seen, score, float("-inf")), scores, at - piece.span)

    def _scored(self, first: Value, number: int, turned: list[Value]) -> list[list[Value]]:
        """Sums of ``number`` queries over D, for 16 positions of each block."""
        k, steps = self.k, self._steps()
        chains = 2 - steps % 2
        queries = [self._query(first + query) for query in range(number)]
        zero = k.constant(0.0, vector(F32))
        sums = [[[k.variable(zero) for _ in range(chains)] for _ in turned] for _ in queries]
        with k.loop(0, steps, chains) as step:
            for chain in range(chains):
                keys = [k.load(block, vector(F32), (step + chain) * LANES) for block in turned]
                for query, of_query in zip(queries, sums, strict=True):
                    term = k.spread(k.load(query, F32, step + chain))
                    for key, mine in zip(keys, of_query, strict=True):
                        mine[chain].value = self._added(mine[chain].value, term, key)
        return [
            [mine[0].value + mine[1].value if chains > 1 else mine[0].value for mine in of_query] for of_query in sums
        ]

    def _added(self, total: Value, first: Value, second: Value) -> Value:
        if not self.dot:
            return self.k.fma(first, second, total)
        pairs = [self.k.bits(each, vector(BF16, 2 * LANES)) for each in (first, second)]
        return self.k.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, *pairs)

    def mix(self, values: StoredKV, piece: SpanTile, part: Value) -> None:
        """Add the weighted values of a piece to its queries' sums."""
        k, each = self.k, piece.count // piece.apart
        self._arrange_values(values, piece)
        with k.loop(*piece.heads) as head, k.loop(0, piece.apart) as row:
            before, begin = (head - piece.heads[0]) * piece.all, piece.first + row * each
            end = k.load(piece.ends, I64, (begin + each - 1) // self.team)
            end = k.smallest(piece.high, k.select(piece.apart > 1, end, piece.high))
            for low, high in self._nearby(piece.low, end):
                for first, number in self._tiles(begin, begin + each, _QUERIES):
                    size = LANES * min(self.vectors, self.sums // number)
                    for at in range(0, self.value_dim, size):
                        vectors = range(at, min(at + size, self.value_dim), LANES)
                        self._mixed(piece, (head, low, high), range(number), before + first, part, vectors)

    def _nearby(self, low: Value, end: Value) -> Iterator[tuple[Value, Value]]:
        """Positions whose values are added to all queries before the next ones. With narrow registers few queries are
        added to at once, and each few of them read these values from the first-level cache."""
        if self.k.processor.wide:
            yield low, end
            return
        count = max(LANES, _NEAR // (self.width * BYTES[F32]) // LANES * LANES)
        with self.k.loop(low, end, count) as begin:
            yield begin, self.k.smallest(end, begin + count)

    def _mixed(
        self,
        piece: SpanTile,
        which: tuple[Value, Value, Value],
        queries: range,
        first: Value,
        part: Value,
        vectors: range,
    ) -> None:
        """Some vectors of some queries. which: the kv head, and the range of positions that they attend to."""
        k, together, (head, low, end) = self.k, self._together(), which
        parts = [k.at(part, (first + query) * part_of(self.value_dim), F32) for query in queries]
        sums = [[k.variable(k.load(own, vector(F32), at)) for at in vectors] for own in parts]
        weights = [self.scores_of(first + query) for query in queries]

        def add(position: Value, half: bool = False) -> None:
            line = self._paired(piece, head, position)
            lines = [k.load(line, vector(F32), at) for at in vectors]
            if half:  # the other one is not attended to, and may be NaN
                lines = [k.bits(k.bits(each, vector(I32)) & 0xFFFF, vector(F32)) for each in lines]
            for weight, mine in zip(weights, sums, strict=True):
                term = k.spread(k.load(weight, F32, (position - piece.span) // together))
                for each, total in zip(lines, mine, strict=True):
                    total.value = self._added(total.value, term, each)

        whole = end // together * together
        with k.loop(low, whole, together) as position:
            add(position)
        if together > 1:
            with k.when((whole < end) & (whole >= low)):
                add(whole, half=True)
        for own, mine in zip(parts, sums, strict=True):
            for at, total in zip(vectors, mine, strict=True):
                k.store(total.value, own, at)
