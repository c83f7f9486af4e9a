"""Ops of :mod:`foresay.verifier.ops.sample`, as entries of a recording: small enough for one thread per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import launch
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.choice import ROOM, Largest
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, I16, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import MOST_CHILDREN, Above, Kept, Pieces

LOWEST = float("-inf")
#: Knots of curves, including infinite ones.
_KNOTS = 2 * LANES


def keep_children(
    children: Tensor,
    chances: Tensor,
    above: Above,
    marks: Tensor,
    picks: Tensor | None = None,
    curves: Pieces | None = None,
) -> Kept:
    """As :func:`foresay.verifier.ops.sample.keep_children`."""
    (sequences, rows, looked), (front, count) = children.shape, (above.scores.shape[1], len(marks))
    assert front <= MOST_CHILDREN and looked <= MOST_CHILDREN, "a tree has no more nodes"
    kept = Kept(*(launch.room((sequences, count), of) for of in (torch.int64,) * 3 + (torch.float32, torch.int64)))
    knots, slopes, shifts, pieces, least = curves or (0, 0, 0, 0, 0.0)
    groups = 0 if curves is None else curves.slopes.shape[1] // pieces
    _keeping(picks is not None, groups, pieces, least)(
        children, chances, *above, marks, 0 if picks is None else picks, knots, slopes, shifts, *kept,
        sequences, rows, front, looked, count,
    )  # fmt: skip
    return kept


def worth_another(front: Tensor, bars: Tensor) -> Tensor:
    """As :func:`foresay.verifier.ops.sample.worth_another`."""
    out = launch.room(front.shape, torch.float32)
    _weighing(bars.shape[1])(front, bars, out, *front.shape)
    return out


@Compiled
def _weighing(numbers: int) -> Kernel:
    k = Kernel("worth_another")
    front, bars, out, width = *(k.pointer(index) for index in range(3)), k.number(4)
    with k.share(k.number(3)) as sequence:
        *shares, row, level = (k.load(bars, F32, sequence * numbers + index) for index in range(numbers))
        beyond = k.variable(k.constant(0.0, F32))
        with k.loop(0, width) as node:
            chance = k.exp(k.load(front, F32, sequence * width + node))
            for share in shares:
                more = chance * share - row
                beyond.value = beyond.value + k.select(more > 0.0, more, 0.0)
        goes = beyond.value >= level
        with k.loop(0, width) as node:
            at = sequence * width + node
            k.store(k.select(goes, k.load(front, F32, at), LOWEST), out, at)
    return k


@Compiled
def _keeping(picked: bool, groups: int, pieces: int, least: float) -> Kernel:
    return _Keeper(Kernel("keep_children"), (groups, pieces, least)).write(picked)


class _Keeper:
    """Arguments: the op's arguments, its results, and the numbers S, R, F, k, W."""

    def __init__(self, k: Kernel, curves: tuple[int, int, float]) -> None:
        self.k, self.curves = k, curves
        self.children, self.chances, self.scores, self.words, self.numbers, self.marks, self.picks = (
            k.pointer(index) for index in range(7)
        )
        self.knots, self.slopes, self.shifts = (k.pointer(index) for index in range(7, 10))
        self.out = Kept(*(k.pointer(index) for index in range(10, 15)))  # type: ignore[arg-type]
        self.sequences, self.rows, self.front, self.looked, self.count = (k.number(index) for index in range(15, 20))
        self.room = k.array(F32, MOST_CHILDREN * MOST_CHILDREN + LANES)

    def write(self, picked: bool) -> Kernel:
        k = self.k
        largest = None if picked else Largest(k, k.array(F32, ROOM), k.array(I32, ROOM))
        with k.share(self.sequences) as sequence:
            self._score(sequence)
            if largest is None:
                with k.loop(0, self.count) as rank:
                    self._keep(sequence, rank, k.load(self.picks, I64, rank))
            else:
                self._rank(largest)
                with k.loop(0, self.count) as rank:
                    self._keep(sequence, rank, k.integer(k.load(largest.columns, I32, rank), I64), largest)
        return k

    def _row(self, sequence: Value, node: Value) -> Value:
        """The offset of a node's children; they are the same for all nodes if there is one row."""
        own = self.k.select(self.rows > 1, node, 0)
        return (sequence * self.rows + own) * self.looked

    def _score(self, sequence: Value) -> None:
        """Write the scores of all children."""
        k = self.k
        with k.loop(0, self.front) as node:
            above, row = k.load(self.scores, F32, sequence * self.front + node), self._row(sequence, node)
            with k.loop(0, self.looked) as rank:
                chance = k.load(self.chances, F32, row + rank)
                hit = self._hit(sequence, rank, chance)
                k.store(k.select(hit < 0.0, hit, 0.0) + above, self.room, node * self.looked + rank)
        k.store(k.constant(LOWEST, vector(F32)), self.room, self.front * self.looked)

    def _hit(self, sequence: Value, rank: Value, chance: Value) -> Value:
        k, (groups, pieces, least) = self.k, self.curves
        if not groups:
            return chance
        sound = k.select(chance > least, chance, least)
        below = k.constant(0)
        for at in range(0, _KNOTS, LANES):
            lower = k.load(self.knots, vector(F32), at) < sound
            below = below + k.call("llvm.ctpop.i64", I64, k.integer(k.bits(lower, I16), I64) & 0xFFFF)
        group = k.select(rank < groups - 1, rank, groups - 1)
        index = (sequence * groups + group) * pieces + below
        made = k.load(self.slopes, F32, index) * sound + k.load(self.shifts, F32, index)
        return k.select(chance > LOWEST, made, LOWEST)

    def _rank(self, largest: Largest) -> None:
        k, first = self.k, self.k.constant(0)
        largest.clear(first)
        largest.turn_to(first, self.count)
        with k.loop(0, self.front * self.looked, LANES) as at:
            scores = k.load(self.room, vector(F32), at)
            with k.when(largest.may_hold(scores)):
                largest.offer(scores, k.spread(k.integer(at, I32)) + k.lane_numbers(range(LANES)))

    def _keep(self, sequence: Value, rank: Value, index: Value, largest: Largest | None = None) -> None:
        """Write one of the kept."""
        k, at = self.k, sequence * self.count + rank
        node, child = index // self.looked, index % self.looked
        score = k.load(self.room if largest is None else largest.values, F32, index if largest is None else rank)
        word = k.load(self.words, I64, sequence * self.front + node) | k.load(self.marks, I64, rank)
        token = k.load(self.children, I64, self._row(sequence, node) + child)
        found = Kept(token, node, k.load(self.numbers, I64, node), score, word)  # type: ignore[arg-type]
        for value, out in zip(found, self.out, strict=True):
            k.store(value, out, at)  # type: ignore[arg-type]
