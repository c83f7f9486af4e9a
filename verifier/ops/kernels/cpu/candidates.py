"""The sample of each row, and the likeliest children of each node: in two entries, without sorting a row.

::

    scan     pieces x rows   the largest of a piece of a row, with noise or without; its largest logit, and its mass
    decide   rows            merges the lists of a row; with filters, what they keep

A thread has one list for each row, which continues from piece to piece. What top-k keeps, and for children what any
filter keeps, is decided among the likeliest: they are listed without noise, which is added to those kept. If these are
too many for the list, the thread that decides scans the row again.

For a sample the other filters are checked for the winner among all tokens, with noise. Each keeps the tokens from some
logit upwards: so if the winner is removed, every survivor is likelier than it, and the next winner is the largest noisy
logit among the *likelier* tokens.

Most tokens are too unlikely to be listed with any noise, by its bound
(:class:`foresay.verifier.ops.kernels.cpu.topk.PositionNoise`). The noise of a piece is reused by the next row at the
same position, such as a sibling. A row's sums run in the order of its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.kernels.cpu import launch, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.topk import ROOM, Largest, PositionNoise
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import MIN_TEMPERATURE, MOST_CHILDREN, RowSampling

INFINITY = float("inf")
#: Columns of a piece; it determines the order of a row's sums.
PIECE = 2048


def candidates(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None, exact: bool, live: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.sample.best_children`; or, ``exact``, a sample of each of ``live`` rows."""
    (rows, width), s = logits.shape, sampling
    given = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
    lists = (launch.arena((threads.MOST, rows, ROOM), of) for of in (torch.float32, torch.int32))
    pieces = rows, -(-width // PIECE)
    numbers = (launch.arena((1,), torch.int64), *(launch.arena(pieces, torch.float32) for _ in "tm"))
    tokens, chances = launch.arena((rows, count), torch.int64), launch.arena((rows, count), torch.float32)
    arguments = (
        logits, 0 if token_ids is None else token_ids.contiguous(), *given, *lists, *numbers, tokens, chances,
        width, count, rows, launch.counted(live, rows),
    )  # fmt: skip
    shape = (PIECE, token_ids is not None, exact)
    _scanning(*shape)(*arguments)
    _deciding(*shape)(*arguments)
    return tokens, chances


@Compiled
def _scanning(piece: int, own_ids: bool, exact: bool) -> Kernel:
    k = Kernel("scan")
    writer = _Writer(k, piece, own_ids, exact)
    k.store(k.threads, writer.threads)  # each writes the same value
    with k.loop(0, writer.rows) as number:
        writer.lists.clear(writer.list_of(k.thread, number))
    with k.share(writer.pieces * writer.rows) as unit:
        row = _Row(writer, unit % writer.rows)
        writer.lists.turn_to(writer.list_of(k.thread, row.number), k.select(row.listed, row.limit + 1, writer.count))
        writer.scan(row, unit // writer.rows, writer.lists, row.hot & row.listed.equals(0))
    return k


@Compiled
def _deciding(piece: int, own_ids: bool, exact: bool) -> Kernel:
    k = Kernel("decide")
    writer = _Writer(k, piece, own_ids, exact)
    with k.share(writer.rows) as number:
        writer.decide(_Row(writer, number))
    return k


class _Row:
    """How a row is sampled. by_k: whether a list can hold what top-k keeps. listed: whether the likeliest are listed
    without noise, of which at most ``limit`` are kept."""

    def __init__(self, writer: _Writer, number: Value) -> None:
        k, types = writer.k, (F32, I32, F32, F32, I64, I64)
        heat, top_k, self.p, self.min_p, *self.key = (
            k.load(array, of, number) for array, of in zip(writer.given, types, strict=True)
        )
        self.number, self.start = number, k.at(writer.logits, number * writer.width, F32)
        self.hot, self.k, self.noise = heat >= MIN_TEMPERATURE, k.integer(top_k, I64), PositionNoise(k, *self.key)
        self.heat, self.by_k = k.select(self.hot, heat, 1.0), (self.k > 0) & (self.k <= MOST_CHILDREN)
        by_mass = (self.p < 1.0) | (self.min_p > 0.0)
        self.filtered = self.hot & (by_mass | (self.k > 0))
        self.listed = self.hot & (self.by_k if writer.exact else self.by_k | by_mass)
        self.limit = k.select(self.by_k, self.k, MOST_CHILDREN - 1)


class _Writer:
    """Writes both kernels, whose arguments are the same. exact: one sample of each row; else children and chances."""

    def __init__(self, k: Kernel, piece: int, own_ids: bool, exact: bool) -> None:
        self.k, self.piece, self.own_ids, self.exact = k, piece, own_ids, exact
        self.logits, self.ids, *self.given = (k.pointer(index) for index in range(8))
        values, columns, self.threads, self.tops, self.masses, self.tokens, self.chances = (
            k.pointer(index) for index in range(8, 15)
        )
        self.width, self.count, self.most_rows, self.rows = k.number(15), k.number(16), k.number(17), k.counted(18)
        self.pieces = (self.width + (piece - 1)) // piece
        self.lists = Largest(k, values, columns)
        self.best, self.likeliest = (Largest(k, k.array(F32, ROOM), k.array(I32, ROOM)) for _ in range(2))
        self.scaled, self.made = k.array(F32, piece), k.array(F32, piece)
        self.made_of = [k.variable(k.constant(-1)) for _ in range(3)]  # piece, seed and position
        self.weights, self.kept_ids = k.array(F32, ROOM), k.array(I32, ROOM)

    def list_of(self, thread: Value, row: Value) -> Value:
        """The number of a thread's list for a row."""
        return thread * self.most_rows + row

    # -- the way through a row --------------------------------------------------------------------------------------

    def scan(self, row: _Row, piece: Value, largest: Largest, noisy: Value) -> None:
        """Offer the tokens of a piece, and write its largest scaled logit, and its mass if needed."""
        k, begin, index = self.k, piece * self.piece, row.number * self.pieces + piece
        end = k.smallest(begin + self.piece, self.width)
        largest_yet = k.variable(k.constant(-INFINITY, vector(F32)))
        with k.loop(begin, end, LANES) as at:
            scaled = self._scaled(row, at)
            k.store(scaled, self.scaled, at - begin)
            largest_yet.value = k.larger(scaled, largest_yet.value)
        top = k.folded(largest_yet.value, k.larger)
        k.store(top, self.tops, index)
        with k.builder.if_else(noisy.raw) as (with_noise, without):
            with with_noise:
                self._make_noise(row, piece, begin, end)
                with k.loop(begin, end, LANES) as at:
                    scaled, made = (k.load(room, vector(F32), at - begin) for room in (self.scaled, self.made))
                    self._offer_noisy(row, largest, scaled, made, at)
                with k.when(row.p < (1.0 if self.exact else INFINITY)):
                    k.store(self._mass_of(end - begin, top, divided=not self.exact), self.masses, index)
            with without:
                with k.loop(begin, end, LANES) as at:
                    scaled = k.load(self.scaled, vector(F32), at - begin)
                    with k.when(largest.may_hold(scaled)):
                        largest.offer(scaled, k.counting(at))
                if not self.exact:
                    k.store(self._mass_of(end - begin, top, divided=False), self.masses, index)

    def _scaled(self, row: _Row, at: Value) -> Value:
        """A vector of scaled logits. NaN and infinity are excluded; or they count as the largest, and break a
        sample."""
        raw = self.k.some(row.start, F32, at, self.width, -INFINITY)
        return self.k.select(raw < INFINITY, raw, INFINITY if self.exact else -INFINITY) / row.heat

    def _uniform(self, row: _Row, at: Value) -> Value:
        """The uniform numbers of the noise of these columns, the first of which is ``at``."""
        k = self.k
        ids = k.integer(k.some(self.ids, I64, at, self.width, 0), I32) if self.own_ids else k.counting(at)
        return row.noise.uniform(ids)

    def _make_noise(self, row: _Row, piece: Value, begin: Value, end: Value) -> None:
        """Write the basis of the piece's noise, if it is not there yet: uniform numbers, few of which have to become
        noise; or the exponentials that the mass needs."""
        k, wanted = self.k, (piece, *row.key)
        others = [of.value.differs(value) for of, value in zip(self.made_of, wanted, strict=True)]
        with k.when(others[0] | others[1] | others[2]):
            for of, value in zip(self.made_of, wanted, strict=True):
                of.value = value
            with k.loop(begin, end, LANES) as at:
                uniform = self._uniform(row, at)
                k.store(uniform if self.exact else row.noise.exponential(uniform), self.made, at - begin)

    def _offer_noisy(self, row: _Row, largest: Largest, scaled: Value, made: Value, at: Value) -> None:
        """Offer the tokens of a vector with their noise, which is computed if any of them may be listed."""
        k = self.k
        with k.when(largest.may_hold(scaled + row.noise.at_most(made))):
            exponential = row.noise.exponential(made) if self.exact else made
            largest.offer(scaled - k.log(exponential), k.counting(at))

    def _mass_of(self, length: Value, top: Value, divided: bool) -> Value:
        """The sum of a piece's exponentials, relative to ``top``; divided by those of the noise, if it is with
        noise."""
        k = self.k
        total, base = k.variable(k.constant(0.0, vector(F32))), _or_zero(top)
        with k.loop(0, length, LANES) as at:
            weight = k.exp_below(k.load(self.scaled, vector(F32), at) - base)
            total.value = total.value + (weight / k.load(self.made, vector(F32), at) if divided else weight)
        return k.total(total.value)

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self, row: _Row) -> None:
        """Merge the lists of a row, and write the result."""
        k, (top, base, mass) = self.k, self._weighed(row)
        decided, log_sum = k.variable(k.constant(0)), k.variable(k.constant(0.0, F32))
        with k.when(row.listed):
            self._merge(self.likeliest, row, row.limit + 1)
            least, decides = self._filter(row, base, mass)
            decided.value = k.select(decides, k.constant(1), 0)
            log_sum.value = self._add_noise(row, least)
        with k.when(row.listed.equals(0)):
            self._merge(self.best, row, self.count)
        if self.exact:
            self._write_sample(row, top, mass, decided.value)
            return
        with k.when(decided.value.equals(0)):
            with k.when(row.listed):
                self.best.begin(self.count)
                with k.loop(0, self.pieces) as piece:
                    self.scan(row, piece, self.best, k.constant(1, I1))
            log_sum.value = base + k.log(self._weighed(row)[2])
        self._write_children(row, log_sum.value)

    def _merge(self, into: Largest, row: _Row, count: Value) -> None:
        """The largest of the row's lists."""
        k = self.k
        into.begin(count)
        with k.loop(0, k.load(self.threads, I64)) as thread:
            into.take_in(*self.lists.list_at(self.list_of(thread, row.number)))

    def _weighed(self, row: _Row) -> tuple[Value, Value, Value]:
        """The row's largest scaled logit; the value its exponentials are relative to, and their sum."""
        k, begin, end = self.k, row.number * self.pieces, (row.number + 1) * self.pieces
        top, mass = k.variable(k.constant(-INFINITY, F32)), k.variable(k.constant(0.0, F32))
        with k.loop(begin, end) as index:
            top.value = k.larger(k.load(self.tops, F32, index), top.value)
        base = _or_zero(top.value)
        with k.loop(begin, end) as index:
            weight = k.exp(k.load(self.tops, F32, index) - base)
            mass.value = k.fma(k.load(self.masses, F32, index), weight, mass.value)
        return top.value, base, mass.value

    def _filter(self, row: _Row, top: Value, mass: Value) -> tuple[Value, Value]:
        """The least logit that the filters keep, and whether they only keep listed tokens: ties stay in."""
        k, values = self.k, self.likeliest.values
        by_k, before, least = (k.variable(of) for of in (*[k.constant(0.0, F32)] * 2, k.load(values, F32)))
        with k.loop(0, row.limit + 1, LANES) as at:
            k.store(k.exp(k.load(values, vector(F32), at) - top), self.weights, at)
        with k.loop(0, row.limit) as rank:
            by_k.value = by_k.value + k.load(self.weights, F32, rank)
        enough = k.select(row.p < 1.0, k.select(row.by_k, by_k.value, mass) * row.p, INFINITY)
        with k.loop(0, k.select(row.by_k, row.limit, row.limit + 1)) as rank:
            weight = k.load(self.weights, F32, rank)
            stays = (before.value < enough) & (weight >= row.min_p)
            least.value = k.select(stays, k.load(values, F32, rank), least.value)
            before.value = before.value + weight
        last, border = k.load(values, F32, row.limit), k.load(values, F32, row.limit - 1)
        return least.value, (last < k.select(row.by_k, border, least.value)) | (last <= -INFINITY)

    def _add_noise(self, row: _Row, least: Value) -> Value:
        """Sort the kept tokens by their noisy logits; returns the log of their mass."""
        k, columns = self.k, self.likeliest.columns
        self.best.begin(k.constant(MOST_CHILDREN))
        with k.loop(0, row.limit) as rank:
            k.store(k.integer(self._token(k.load(columns, I32, rank)), I32), self.kept_ids, rank)
        with k.loop(0, row.limit, LANES) as at:
            scaled = k.load(self.likeliest.values, vector(F32), at)
            noisy = scaled + row.noise.gumbel(row.noise.uniform(k.load(self.kept_ids, vector(I32), at)))
            kept = (scaled >= least) & (k.counting(at) < k.integer(row.limit, I32))
            self.best.offer(k.select(kept, noisy, -INFINITY), k.load(columns, vector(I32), at))
        largest, mass = _or_zero(k.load(self.best.values, F32)), k.variable(k.constant(0.0, vector(F32)))
        with k.loop(0, MOST_CHILDREN, LANES) as at:
            mass.value = mass.value + k.exp(k.load(self.best.values, vector(F32), at) - largest)
        return largest + k.log(k.total(mass.value))

    # -- the search for a sample ------------------------------------------------------------------------------------

    def _search(self, row: _Row, top: Value, mass: Value, token: Variable, pivot: Variable) -> None:
        """Find the first winner that survives: fewer than k tokens are likelier, with less mass than p together; and it
        has ``min_p``. token: the winner among all, with this scaled logit; or there is none yet, and that is lower."""
        k, by_k = self.k, (row.k > 0) & (row.k < self.width)
        floor, going = k.variable(k.constant(-INFINITY, F32)), k.variable(k.constant(1))
        enough = k.variable(k.select(row.p < 1.0, mass * row.p, INFINITY))
        with k.when(by_k & (row.p < 1.0)):
            floor.value = self._below_top_k(row, top)
            enough.value = self._likelier(row, top, floor.value)[1] * row.p
        with k.during(going):
            count, above = self._likelier(row, top, pivot.value)
            stands = (count < k.select(by_k, row.k, self.width)) & (pivot.value > floor.value)
            stands = stands & (k.exp(pivot.value - top) >= row.min_p) & (above < enough.value)
            stands = stands | count.equals(0)  # no filter removes the likeliest
            going.value = k.select(stands, k.constant(0), 1)
            with k.when(stands.equals(0)):
                token.value = k.integer(k.load(self.best.columns, I32), I64)
                pivot.value = k.load(row.start, F32, token.value) / row.heat

    def _likelier(self, row: _Row, top: Value, pivot: Value, draws: bool = True) -> tuple[Value, Value]:
        """How many tokens are likelier than the pivot; and, with ``draws``, their mass, and in ``best`` which of them
        wins."""
        k = self.k
        count, mass = (k.variable(k.constant(0, vector(of))) for of in (I32, F32))
        self.best.begin(k.constant(1))
        with k.loop(0, self.width, LANES) as at:
            scaled = self._scaled(row, at)
            above = scaled > pivot
            count.value = count.value + k.select(above, k.constant(1, vector(I32)), 0)
            if draws:
                with k.when(k.any(above)):
                    weight = k.exp_below(scaled - top)
                    mass.value = mass.value + k.select(above, weight, 0.0)
                    possible = k.select(above & (weight >= row.min_p), scaled, -INFINITY)
                    self._offer_noisy(row, self.best, possible, self._uniform(row, at), at)
        return k.integer(k.total(count.value), I64), k.total(mass.value)

    def _below_top_k(self, row: _Row, top: Value) -> Value:
        """The largest number that k scaled logits are above, by bisection; or one so low that all that weigh anything
        are."""
        k = self.k
        apart = k.larger(top, top * -1.0) * 1e-6 + 88.0  # at least some steps, however large the numbers are
        low, high, going = k.variable(top - apart), k.variable(top), k.variable(k.constant(1))
        with k.during(going):
            middle = low.value + (high.value - low.value) * 0.5
            few = self._likelier(row, top, middle, draws=False)[0] < row.k
            going.value = k.select((middle > low.value) & (middle < high.value), k.constant(1), 0)
            high.value = k.select(few, middle, high.value)
            low.value = k.select(few, low.value, middle)
        return low.value

    # -- results ----------------------------------------------------------------------------------------------------

    def _token(self, column: Value) -> Value:
        column = self.k.integer(column, I64)
        return self.k.load(self.ids, I64, column) if self.own_ids else column

    def _write_children(self, row: _Row, log_sum: Value) -> None:
        """Write the first entries; minus infinity means none."""
        k = self.k
        with k.loop(0, self.count) as rank:
            value, index = k.load(self.best.values, F32, rank), row.number * self.count + rank
            token = self._token(k.load(self.best.columns, I32, rank))
            k.store(k.select(value > -INFINITY, token, 0), self.tokens, index)
            k.store(k.select(value > -INFINITY, value - log_sum, -INFINITY), self.chances, index)

    def _write_sample(self, row: _Row, top: Value, mass: Value, decided: Value) -> None:
        k, sound = self.k, (top < INFINITY) & (top > -INFINITY)
        token = k.variable(k.integer(k.load(self.best.columns, I32), I64))
        pivot = k.variable(k.select(row.listed, -INFINITY, k.load(row.start, F32, token.value) / row.heat))
        with k.when(sound & row.filtered & decided.equals(0) & (pivot.value < top)):
            self._search(row, top, mass, token, pivot)
        k.store(k.select(sound, self._token(token.value), BROKEN), self.tokens, row.number)


def _or_zero(top: Value) -> Value:
    """The value that exponentials are relative to: any number if there is only minus infinity."""
    return top.kernel.select(top > -INFINITY, top, 0.0)
