"""What is sampled from each row, and the likeliest children of each node: in two entries, without sorting a row.

::

    scan     pieces x rows   the largest of a piece of a row, with noise or without; its largest logit, and its mass
    decide   rows            the lists of a row merged; where filters are on, what they keep

A thread has one list for each row, which goes on from piece to piece. What top-k keeps, and of children what any filter
does, is decided among the likeliest: they are listed without noise, which is added to what is kept. If it is too many
for the list, the thread that decides goes through the row again.

Of a sample other filters are asked about the winner among all tokens, with noise. Each keeps the tokens from some logit
upwards: so if the winner is taken out, every survivor is likelier than it, and the next winner is the largest noisy
logit among the *likelier* tokens.

Most tokens are too unlikely to be listed whatever their noise: its bound tells
(:class:`foresay.verifier.ops.kernels.cpu.noise.PositionNoise`). The noise of a piece is used again by the next row at
the same position, as siblings are. A row's sums run in the order of its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.kernels.cpu import launch, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.largest import ROOM, Largest
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.noise import PositionNoise
from foresay.verifier.ops.kernels.cpu.types import F32, I1, I32, I64, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import COLDEST, MOST_CHILDREN, RowSampling

INFINITY = float("inf")
#: Columns of a piece; the order of a row's sums follows from it.
PIECE = 2048


def candidates(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None, exact: bool, live: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.sample.candidates`."""
    rows, width = logits.shape
    s = sampling
    asked = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
    lists = (launch.room((threads.MOST, rows, ROOM), of) for of in (torch.float32, torch.int32))
    numbers = (launch.room((1,), torch.int64), *(launch.room((rows, -(-width // PIECE)), torch.float32) for _ in "tm"))
    tokens, chances = launch.room((rows, count), torch.int64), launch.room((rows, count), torch.float32)
    arguments = (
        logits, 0 if token_ids is None else token_ids.contiguous(), *asked, *lists, *numbers, tokens, chances,
        width, count, rows, launch.counted(live, rows),
    )  # fmt: skip
    shape = (PIECE, token_ids is not None, exact)
    _scanning(*shape)(*arguments)
    _deciding(*shape)(*arguments)
    return tokens, chances


@Compiled
def _scanning(piece: int, own_ids: bool, exact: bool) -> Kernel:
    k = Kernel("scan")
    rows = _Rows(k, piece, own_ids, exact)
    k.store(k.threads, rows.threads)  # each says the same
    with k.loop(0, rows.rows) as row:
        rows.lists.clear(rows.list_of(k.thread, row))
    with k.share(rows.pieces * rows.rows) as unit:
        asked = rows.asked_of(unit % rows.rows)
        rows.lists.turn_to(rows.list_of(k.thread, asked.row), k.select(asked.listed, asked.limit + 1, rows.count))
        rows.scan(asked, unit // rows.rows, rows.lists, asked.hot & asked.listed.equals(0))
    return k


@Compiled
def _deciding(piece: int, own_ids: bool, exact: bool) -> Kernel:
    k = Kernel("decide")
    decision = _Decision(_Rows(k, piece, own_ids, exact))
    with k.share(decision.rows.rows) as row:
        decision.decide(decision.rows.asked_of(row))
    return k


@dataclass(frozen=True, slots=True)
class _Asked:
    """How a row is sampled. heat: what its logits are divided by. by_k: whether a list holds what top-k keeps. listed:
    whether the likeliest are listed without noise, of which ``limit`` at most are kept."""

    row: Value
    start: Value
    heat: Value
    hot: Value
    k: Value
    p: Value
    min_p: Value
    by_k: Value
    listed: Value
    limit: Value
    key: tuple[Value, Value]
    noise: PositionNoise


class _Rows:
    """What both kernels are given, and the way through a piece of a row. exact: one sample of each row; else children
    and their chances."""

    def __init__(self, k: Kernel, piece: int, own_ids: bool, exact: bool) -> None:
        self.k, self.piece, self.own_ids, self.exact = k, piece, own_ids, exact
        self.logits, self.ids, *self.arrays = (k.pointer(index) for index in range(8))
        values, columns, self.threads, self.tops, self.masses, self.tokens, self.chances = (
            k.pointer(index) for index in range(8, 15)
        )
        self.width, self.count, self.most_rows, self.rows = k.number(15), k.number(16), k.number(17), k.counted(18)
        self.pieces = (self.width + (piece - 1)) // piece
        self.lists = Largest(k, values, columns)
        self.scaled, self.made = k.array(F32, piece), k.array(F32, piece)
        self.made_of = [k.variable(k.constant(-1)) for _ in range(3)]  # piece, seed and position

    def asked_of(self, row: Value) -> _Asked:
        """What is asked of a row."""
        k, types = self.k, (F32, I32, F32, F32, I64, I64)
        heat, top_k, p, min_p, *key = (k.load(array, of, row) for array, of in zip(self.arrays, types, strict=True))
        hot, top_k = heat >= COLDEST, k.integer(top_k, I64)
        by_k = (top_k > 0) & (top_k <= MOST_CHILDREN)
        listed = hot & (by_k if self.exact else by_k | (p < 1.0) | (min_p > 0.0))
        start, heat, limit = (
            k.at(self.logits, row * self.width, F32),
            k.select(hot, heat, 1.0),
            k.select(by_k, top_k, MOST_CHILDREN),
        )
        return _Asked(
            row, start, heat, hot, top_k, p, min_p, by_k, listed, limit, (key[0], key[1]), PositionNoise(k, *key)
        )

    def list_of(self, thread: Value, row: Value) -> Value:
        """The number of the list that a thread has of a row."""
        return thread * self.most_rows + row

    def ids_of(self, at: Value) -> Value:
        """int32: whose noise is that of these columns, the first of which is ``at``."""
        k = self.k
        return k.integer(k.some(self.ids, I64, at, self.width, 0), I32) if self.own_ids else k.counting(at)

    def scaled_at(self, asked: _Asked, at: Value) -> Value:
        """A vector of scaled logits. What is no number, or infinite, is ruled out; or it is the largest, and breaks a
        sample."""
        k = self.k
        raw = k.some(asked.start, F32, at, self.width, -INFINITY)
        return k.select(raw < INFINITY, raw, INFINITY if self.exact else -INFINITY) / asked.heat

    def scan(self, asked: _Asked, piece: Value, largest: Largest, noisy: Value) -> None:
        """Offer the tokens of a piece, and write its largest scaled logit and its mass, if that is of any use."""
        k, begin = self.k, piece * self.piece
        end = k.smallest(begin + self.piece, self.width)
        top = k.variable(k.constant(-INFINITY, vector(F32)))
        with k.loop(begin, end, LANES) as at:
            scaled = self.scaled_at(asked, at)
            k.store(scaled, self.scaled, at - begin)
            top.value = k.larger(scaled, top.value)
        top, place = k.folded(top.value, k.larger), asked.row * self.pieces + piece
        k.store(top, self.tops, place)
        with k.builder.if_else(noisy.raw) as (with_noise, without):
            with with_noise:
                self._make_noise(asked, piece, begin, end)
                with k.loop(begin, end, LANES) as at:
                    scaled, made = (k.load(room, vector(F32), at - begin) for room in (self.scaled, self.made))
                    self.offer_noisy(asked.noise, largest, scaled, made, at)
                with k.when(asked.p < (1.0 if self.exact else INFINITY)):
                    k.store(self._mass(end - begin, top, divided=not self.exact), self.masses, place)
            with without:
                with k.loop(begin, end, LANES) as at:
                    scaled = k.load(self.scaled, vector(F32), at - begin)
                    with k.when(largest.may_hold(scaled)):
                        largest.offer(scaled, k.counting(at))
                if not self.exact:
                    k.store(self._mass(end - begin, top, divided=False), self.masses, place)

    def _make_noise(self, asked: _Asked, piece: Value, begin: Value, end: Value) -> None:
        """Write what the piece's noise is made of, if that is not there yet: uniform numbers, of which few have to
        become noise; or the exponentials that the mass needs."""
        k, wanted = self.k, (piece, *asked.key)
        others = [of.value.differs(value) for of, value in zip(self.made_of, wanted, strict=True)]
        with k.when(others[0] | others[1] | others[2]):
            for of, value in zip(self.made_of, wanted, strict=True):
                of.value = value
            with k.loop(begin, end, LANES) as at:
                uniform = asked.noise.uniform(self.ids_of(at))
                k.store(uniform if self.exact else asked.noise.exponential(uniform), self.made, at - begin)

    def offer_noisy(self, noise: PositionNoise, largest: Largest, scaled: Value, made: Value, at: Value) -> None:
        """Offer the tokens of a vector with their noise, which is computed if any of them may be listed."""
        k = self.k
        with k.when(largest.may_hold(scaled + noise.at_most(made))):
            gumbel = noise.gumbel(made) if self.exact else noise.of_exponential(made)
            largest.offer(scaled + gumbel, k.counting(at))

    def _mass(self, length: Value, top: Value, divided: bool) -> Value:
        """The sum of a piece's exponentials, relative to ``top``; divided by those of the noise, it is with noise."""
        k = self.k
        total, base = k.variable(k.constant(0.0, vector(F32))), or_zero(top)
        with k.loop(0, length, LANES) as at:
            weight = k.exp_below(k.load(self.scaled, vector(F32), at) - base)
            total.value = total.value + (weight / k.load(self.made, vector(F32), at) if divided else weight)
        return k.total(total.value)


class _Decision:
    """Merges the lists of a row, and writes what it found."""

    def __init__(self, rows: _Rows) -> None:
        k = self.k = rows.k
        self.rows = rows
        self.best, self.likeliest = (Largest(k, k.array(F32, ROOM), k.array(I32, ROOM)) for _ in range(2))
        self.weights, self.ids = k.array(F32, ROOM), k.array(I32, ROOM)

    def decide(self, asked: _Asked) -> None:
        """One row."""
        k, rows = self.k, self.rows
        top, decided, log_sum = self._top(asked.row), k.variable(k.constant(0)), k.variable(k.constant(0.0, F32))
        base = or_zero(top)
        with k.when(asked.listed):
            self._merge(self.likeliest, asked.row, asked.limit + 1)
            least, decides = self._filter(asked, base)
            decided.value = k.select(decides, k.constant(1), 0)
            log_sum.value = self._add_noise(asked, least)
        with k.when(asked.listed.equals(0)):
            self._merge(self.best, asked.row, rows.count)
        if rows.exact:
            self._write_sample(asked, top, decided.value.differs(0))
            return
        with k.when(decided.value.equals(0)):
            with k.when(asked.listed):
                self.best.begin(rows.count)
                with k.loop(0, rows.pieces) as piece:
                    rows.scan(asked, piece, self.best, k.constant(1, I1))
            log_sum.value = base + k.log(self._mass(asked.row, base))
        self._write_children(asked.row, log_sum.value)

    def _merge(self, into: Largest, row: Value, count: Value) -> None:
        """The largest of the row's lists."""
        k, rows = self.k, self.rows
        into.begin(count)
        with k.loop(0, k.load(rows.threads, I64)) as thread:
            into.take_in(*rows.lists.list_at(rows.list_of(thread, row)))

    def _top(self, row: Value) -> Value:
        """The row's largest scaled logit."""
        k, rows = self.k, self.rows
        top = k.variable(k.constant(-INFINITY, F32))
        with k.loop(0, rows.pieces) as piece:
            top.value = k.larger(k.load(rows.tops, F32, row * rows.pieces + piece), top.value)
        return top.value

    def _mass(self, row: Value, top: Value) -> Value:
        """The sum of the row's exponentials, relative to ``top``."""
        k, rows = self.k, self.rows
        mass = k.variable(k.constant(0.0, F32))
        with k.loop(row * rows.pieces, (row + 1) * rows.pieces) as place:
            weight = k.exp(k.load(rows.tops, F32, place) - top)
            mass.value = k.fma(k.load(rows.masses, F32, place), weight, mass.value)
        return mass.value

    def _filter(self, asked: _Asked, top: Value) -> tuple[Value, Value]:
        """The least logit that the filters keep, and whether they keep listed tokens alone: ties stay in."""
        k, values = self.k, self.likeliest.values
        with k.loop(0, asked.limit + 1, LANES) as at:
            k.store(k.exp(k.load(values, vector(F32), at) - top), self.weights, at)
        by_k, before = (k.variable(k.constant(0.0, F32)) for _ in range(2))
        with k.loop(0, asked.limit) as rank:
            by_k.value = by_k.value + k.load(self.weights, F32, rank)
        enough = k.select(asked.by_k, by_k.value, self._mass(asked.row, top)) * asked.p
        enough = k.select(asked.p < 1.0, enough, INFINITY)
        least = k.variable(k.load(values, F32))
        with k.loop(0, k.select(asked.by_k, asked.limit, asked.limit + 1)) as rank:
            weight = k.load(self.weights, F32, rank)
            stays = (before.value < enough) & (weight >= asked.min_p)
            least.value = k.select(stays, k.load(values, F32, rank), least.value)
            before.value = before.value + weight
        last, border = k.load(values, F32, asked.limit), k.load(values, F32, asked.limit - 1)
        return least.value, (last < k.select(asked.by_k, border, least.value)) | (last <= -INFINITY)

    def _add_noise(self, asked: _Asked, least: Value) -> Value:
        """Put what is kept in the order of its noisy logits; returns the log of its mass."""
        k = self.k
        self.best.begin(k.constant(MOST_CHILDREN))
        with k.loop(0, asked.limit, LANES) as at:
            with k.loop(at, at + LANES) as rank:
                k.store(k.integer(self._token(k.load(self.likeliest.columns, I32, rank)), I32), self.ids, rank)
            scaled, columns = (
                k.load(room, vector(of), at)
                for room, of in ((self.likeliest.values, F32), (self.likeliest.columns, I32))
            )
            noisy = scaled + asked.noise.gumbel(asked.noise.uniform(k.load(self.ids, vector(I32), at)))
            inside = (scaled >= least) & (k.places(range(LANES)) < k.integer(asked.limit - at, I32))
            self.best.offer(k.select(inside, noisy, -INFINITY), columns)
        largest, mass = or_zero(k.load(self.best.values, F32)), k.variable(k.constant(0.0, vector(F32)))
        with k.loop(0, MOST_CHILDREN, LANES) as at:
            mass.value = mass.value + k.exp(k.load(self.best.values, vector(F32), at) - largest)
        return largest + k.log(k.total(mass.value))

    # -- results ----------------------------------------------------------------------------------------------------

    def _token(self, column: Value) -> Value:
        column = self.k.integer(column, I64)
        return self.k.load(self.rows.ids, I64, column) if self.rows.own_ids else column

    def _write_children(self, row: Value, log_sum: Value) -> None:
        """The first entries; one that is minus infinity is none."""
        k, rows = self.k, self.rows
        with k.loop(0, rows.count) as rank:
            value, place = k.load(self.best.values, F32, rank), row * rows.count + rank
            token = self._token(k.load(self.best.columns, I32, rank))
            k.store(k.select(value > -INFINITY, token, 0), rows.tokens, place)
            k.store(k.select(value > -INFINITY, value - log_sum, -INFINITY), rows.chances, place)

    def _write_sample(self, asked: _Asked, top: Value, decided: Value) -> None:
        k, rows = self.k, self.rows
        found = k.variable(k.integer(k.load(self.best.columns, I32), I64))
        pivot = k.select(asked.listed, -INFINITY, k.load(asked.start, F32, found.value) / asked.heat)
        sound = (top < INFINITY) & (top > -INFINITY)
        filtered = (asked.k > 0) | (asked.p < 1.0) | (asked.min_p > 0.0)
        with k.when(sound & asked.hot & filtered & (pivot < top) & decided.equals(0)):
            _Search(self, asked, top).run(found, pivot)
        k.store(k.select(sound, self._token(k.integer(found.value, I32)), BROKEN), rows.tokens, asked.row)


class _Search:
    """The first winner of a row that stands: fewer than k tokens are likelier, and weigh less than enough together; it
    weighs ``min_p``."""

    def __init__(self, decision: _Decision, asked: _Asked, top: Value) -> None:
        self.k, self.decision, self.asked, self.top = decision.k, decision, asked, top
        self.count, self.mass = (self.k.variable(self.k.constant(0, vector(of))) for of in (I32, F32))

    def run(self, token: Variable, first: Value) -> None:
        """token: the winner among all, whose scaled logit is ``first``; or there is none yet, and that is lower."""
        k, asked = self.k, self.asked
        by_k = (asked.k > 0) & (asked.k < self.decision.rows.width)
        least, pivot = k.variable(k.constant(-INFINITY, F32)), k.variable(first)
        enough = k.variable(k.select(asked.p < 1.0, self.decision._mass(asked.row, self.top) * asked.p, INFINITY))
        with k.when(by_k & (asked.p < 1.0)):
            least.value = self._least_of_top_k()
            with k.when(least.value > -INFINITY):
                _, mass = self._likelier(_unordered(k, _ordered(k, least.value) - 1))
                enough.value = mass * asked.p
        going = k.variable(k.constant(1))
        with k.during(going):
            count, mass = self._likelier(pivot.value, least.value)
            stands = (count < k.select(by_k, asked.k, self.decision.rows.width)) & (pivot.value >= least.value)
            stands = stands & (k.exp(pivot.value - self.top) >= asked.min_p)
            stands = stands & ((mass < enough.value) | count.equals(0))
            going.value = k.select(stands, k.constant(0), 1)
            with k.when(stands.equals(0)):
                token.value = k.integer(k.load(self.decision.best.columns, I32), I64)
                pivot.value = k.load(asked.start, F32, token.value) / asked.heat

    def _likelier(self, pivot: Value, least: Value | None = None) -> tuple[Value, Value]:
        """How many tokens are likelier than the pivot, and what they weigh. ``best`` is then which of those that may
        stand wins; None: nobody asks."""
        k, rows, asked, best = self.k, self.decision.rows, self.asked, self.decision.best
        best.begin(k.constant(1))
        self.count.value, self.mass.value = k.constant(0, vector(I32)), k.constant(0.0, vector(F32))
        with k.loop(0, rows.width, LANES) as at:
            scaled = rows.scaled_at(asked, at)
            above = scaled > pivot
            with k.when(k.any(above)):
                weight = k.exp_below(scaled - self.top)
                self.count.value = self.count.value + k.select(above, k.constant(1, vector(I32)), 0)
                self.mass.value = self.mass.value + k.select(above, weight, 0.0)
                if least is not None:
                    possible = above & (scaled >= least) & (weight >= asked.min_p)
                    uniform = asked.noise.uniform(rows.ids_of(at))
                    rows.offer_noisy(asked.noise, best, k.select(possible, scaled, -INFINITY), uniform, at)
        return k.integer(k.total(self.count.value), I64), k.total(self.mass.value)

    def _least_of_top_k(self) -> Value:
        """The k-th largest scaled logit: the lowest of which fewer are likelier, by bisection over the bits, which are
        in the order of the numbers."""
        k = self.k
        low, high = (k.variable(_ordered(k, value)) for value in (k.constant(-INFINITY, F32), self.top))
        going = k.variable(k.constant(1))
        with k.during(going):
            middle = low.value + ((high.value - low.value) >> 1)
            count, _ = self._likelier(_unordered(k, middle))
            few = count < self.asked.k
            high.value = k.select(few, middle, high.value)
            low.value = k.select(few, low.value, middle + 1)
            going.value = k.select(low.value < high.value, k.constant(1), 0)
        return _unordered(k, low.value)


def or_zero(top: Value) -> Value:
    """What exponentials are relative to: any number where there is nothing but minus infinity."""
    return top.kernel.select(top > -INFINITY, top, 0.0)


def _ordered(k: Kernel, value: Value) -> Value:
    """int64 in the order of the fp32 values."""
    bits = k.bits(value, I32)
    return k.integer(k.select(bits < 0, bits ^ 0x7FFFFFFF, bits), I64)


def _unordered(k: Kernel, number: Value) -> Value:
    """The fp32 value of an ordered number."""
    low = k.integer(number, I32)
    return k.bits(k.select(low < 0, low ^ 0x7FFFFFFF, low), F32)
