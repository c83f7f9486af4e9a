"""The common part of products with every kind of packed weight: the loops around the sums, and the epilogue.

::

    loop     blocks of B outputs (shared among the threads), then groups of some rows, then k: so a block of weights is
             read from memory once, and from the cache for the other groups

A group's sums are in registers: with 32 wide ones 24 vectors, with B 64 and six rows in a group, or B 48 and eight
rows; else B is 16. Fewer sums are no faster, since a term waits for the one before it, apparently for 12 cycles on a
Zen 5: eight rows in two groups cost two passes.

Legend: R rows, K inner width, O outer width, B outputs of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.kernels.cpu import huge_pages
from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.values import BF16, F32, I16, I32, I64, LANES, OF_TORCH, Operand, Value, vector
from foresay.verifier.ops.records import READING, SPANS, Gate, gate_parts

#: Integers that stand for numbers of so many bytes, of any dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Vectors of sums held at once with 32 wide registers, and rows otherwise; and more rows than either.
_SUMS, _ROWS, MANY = 24, 6, 64


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The parameters of a kernel. compute, out: dtypes of inputs and outputs. experts: the weight is that of several
    experts, and rows are sorted by expert (:class:`~foresay.verifier.ops.records.ExpertRows`). heads: the weight is
    that of so many heads, each of which has its own inputs and outputs, adjacent in a row; 0: it is of all."""

    block: int
    compute: torch.dtype
    out: torch.dtype
    gated: Gate
    bias: bool
    experts: bool = field(default=False, kw_only=True)
    heads: int = field(default=0, kw_only=True)


def block_of(processor: Processor, vectors: int = 4) -> int:
    """B. vectors: of a block with wide registers."""
    return vectors * LANES if processor.wide else LANES


def in_turns(part: Callable[[Any], Tensor], whole: Any, gated: Gate, experts: int = 0) -> Tensor:
    """Data by outputs, in blocks; blocks of gate and up alternate. part: makes blocks of some rows of ``whole``, a
    tensor or a quantised matrix. experts: each has its own blocks, which are made one after the other, so that
    intermediate results take little memory."""
    turns, each = gate_parts(gated), max(1, experts)
    rows = whole.split_with_sizes([whole.shape[0] // (turns * each)] * (turns * each))
    first = part(rows[0])
    made = first.new_empty((each, len(first), turns, *first.shape[1:]))
    huge_pages.advise(made)
    for number, one in enumerate(rows):
        made[number % each, :, number // each] = part(one) if number else first
    return made.flatten(0, 2)


def from_turns(part: Callable[[Tensor], Tensor], blocks: Tensor, gated: Gate, outer: int, experts: int = 0) -> Tensor:
    """The reverse. part: makes rows of blocks, including padding rows of the last block."""
    turns, each = gate_parts(gated), max(1, experts)
    halves = blocks.unflatten(0, (-1, turns)).unbind(1)
    return torch.cat([part(one)[: outer // turns // each] for half in halves for one in half.chunk(each)])


def replace_rows(blocks: Tensor, rows: Tensor, source: Tensor, numbers: Tensor) -> None:
    """Make these rows of a packed weight those of another, in place. blocks, source: [O / B, .., B, ..]. rows, numbers:
    int64[N]."""
    block, kind = blocks.shape[2], _BITS[blocks.dtype.itemsize]
    found = source.view(kind)[numbers // block, :, numbers % block]
    blocks.view(kind)[rows // block, :, rows % block] = found


def only_rows(blocks: Tensor, rows: Tensor) -> Tensor:
    """Only these rows of a packed weight, [O / B, .., B, ..]."""
    made = blocks.new_empty((-(-len(rows) // blocks.shape[2]), *blocks.shape[1:]))
    huge_pages.advise(made)
    made.view(torch.uint8).zero_()  # padding
    replace_rows(made, torch.arange(len(rows)), blocks, rows)
    return made


def filled(rows: Tensor, block: int) -> Tensor:
    """[O / B, B, ..]: rows in whole blocks, padded with zeros."""
    behind = (0, 0) * (rows.dim() - 1)
    blocks: Tensor = functional.pad(rows, (*behind, 0, -len(rows) % block)).unflatten(0, (-1, block))
    return blocks


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """[O / B, N, B]: numbers of outputs, [O, N], contiguous for the outputs of a block."""
    return filled(rows, block).transpose(1, 2)


class ProductKernel:
    """Writes a kernel. Arguments: x, weight, out, bias, count, blocks (or pairs of them), widths of out and x. With
    experts the count is a table; blocks, and widths of heads, are those of each."""

    #: Bytes: how far ahead of the sums weights are prefetched.
    ahead = 2048
    #: Rows for which all blocks are read before the next ones, and bytes of the blocks that are read once for each
    #: ``near`` of these rows: both should stay in the second-level cache, and the inputs of ``near`` rows in the first.
    far = near = 1 << 30
    strip = 1 << 17

    def __init__(self, kernel: Kernel, shape: ProductShape) -> None:
        self.k, self.shape = kernel, shape
        self.x, self.weight, self.out, self.bias = (kernel.pointer(index) for index in range(4))
        self.rows, self.blocks, self.width, self.inner = kernel.counted(4), *(kernel.number(at) for at in (5, 6, 7))
        self.vectors = shape.block // LANES
        self.at_once = _SUMS // self.vectors if self.vectors > 1 else _ROWS  # rows
        self.sums, self.gates = (kernel.array(F32, self.at_once * shape.block) for _ in range(2))
        self.head = kernel.constant(0)

    def write(self, most: int) -> Kernel:
        """The whole kernel. most: rows that are multiplied at once, if fewer than its registers hold."""
        k, self.at_once = self.k, min(self.at_once, most)
        with (
            self._work() as (all_rows, blocks, base),
            self._some_of(*all_rows, self.far) as (begin, end),
            self._some_of(*blocks, self._in_strip()) as (first, behind),
            self._some_of(begin, end, self.near) as rows,
            k.loop(first, behind) as block,
        ):
            self._blocks(base, block, *rows)
        return k

    @contextmanager
    def _work(self) -> Iterator[tuple[tuple[Value, Value], tuple[Value, Value], Value]]:
        """Rows, this thread's blocks of outputs, and their first block of the weight: once, or for each expert that has
        rows. A thread's share is measured in rows, with reading a block counted as some rows."""
        k = self.k
        if self.shape.heads:
            begin, end = k.part_of(self.blocks * self.shape.heads)
            with k.loop(begin // self.blocks, (end + self.blocks - 1) // self.blocks) as self.head:
                base = self.head * self.blocks
                first, behind = k.select(begin > base, begin - base, 0), k.smallest(end - base, self.blocks)
                yield (k.constant(0), self.rows), (first, behind), base
            return
        if not self.shape.experts:
            yield (k.constant(0), self.rows), k.part_of(self.blocks), k.constant(0)
            return
        table = k.pointer(4)
        mine = k.part_of(k.load(table, I64, 1) * self.blocks)
        with k.loop(0, self.rows) as number:
            expert, begin, end, before = (k.load(table, I64, number * 4 + (SPANS + at)) for at in range(4))
            cost = end - begin + READING
            first, behind = (self._cut(at - before * self.blocks, cost) for at in mine)
            yield (begin, end), (first, behind), expert * self.blocks * gate_parts(self.shape.gated)

    def _cut(self, share: Value, cost: Value) -> Value:
        """The first of an expert's blocks after this share of its cost."""
        k = self.k
        return k.smallest((k.select(share > 0, share, 0) + cost - 1) // cost, self.blocks)

    @contextmanager
    def _some_of(self, begin: Value, end: Value, count: Operand) -> Iterator[tuple[Value, Value]]:
        """A loop over pieces of a range, of ``count`` each."""
        with self.k.loop(begin, end, count) as first:
            yield first, self.k.smallest(end, first + count)

    def _in_strip(self) -> Operand:
        """Blocks of a strip."""
        return self.far

    def _blocks(self, base: Value, block: Value, begin: Value, end: Value) -> None:
        """A block of outputs of some rows. base: the weight's block that indices start from."""
        k = self.k
        with k.loop(begin, end, self.at_once) as row:
            left = k.smallest(end - row, self.at_once)
            if gate_parts(self.shape.gated) == 2:
                with k.loop(0, 2) as turn:  # one code for gate and up: two take twice as long to compile
                    self._products(base + block * 2 + turn, row, left, k.select(turn > 0, self.sums, self.gates))
            else:
                self._products(base + block, row, left, self.sums)
            with k.loop(0, left) as number, k.loop(0, self.vectors) as at:
                self._store(number * self.shape.block + at * LANES, row + number, block * self.shape.block + at * LANES)

    def _products(self, block: Value, row: Value, left: Value, room: Value) -> None:
        """The sums of one block of outputs for the ``left`` rows of a group, into ``room``."""
        for rows in range(1, self.at_once + 1):
            with self.k.when(left.equals(rows)):
                self._sum(block, row, rows, room)

    @abstractmethod
    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        """The same for ``rows`` rows: row by row, vector by vector."""

    def _rows(self, row: Value, rows: int) -> list[Value]:
        """The address of each row's inputs."""
        of = OF_TORCH[self.shape.compute]
        return [self.k.at(self.x, self._line(row + number) * self.inner, of) for number in range(rows)]

    def _line(self, row: Value) -> Value:
        """Which of the lines of inputs, or of outputs, a row has, or its head."""
        return row * self.shape.heads + self.head if self.shape.heads else row

    def _steps(self, steps: Value) -> Iterator[Value]:
        """The terms' steps, in order."""
        with self.k.loop(0, steps) as step:
            yield step

    def _begun(self, block: Value, at: int) -> Value:
        """A sum before its first term: the bias."""
        if not self.shape.bias:
            return self.k.constant(0.0, vector(F32))
        return self.k.load(self.bias, vector(F32), block * self.shape.block + at * LANES)

    def _prefetch(self, line: Value, size: int) -> None:
        """Prefetch later weights. size: bytes of a step."""
        for at in range(0, size, 64):
            self.k.prefetch(self.k.bytes_at(line, self.ahead + at))

    def _added(self, total: Variable, factor: Value, weight: Value) -> None:
        """Add a term: of numbers, or of pairs of bf16."""
        if factor.floats:
            total.value = self.k.fma(factor, weight, total.value)
        else:
            name, value = "llvm.x86.avx512bf16.dpbf16ps.512", total.value
            total.value = self.k.call(name, value.type, value, factor, weight)

    def _halves(self, words: Value) -> list[Value]:
        """Two bf16 in each word, as fp32."""
        of = self.k.like(words, F32)
        return [self.k.bits(words << 16, of), self.k.bits(words & -65536, of)]

    def _pair(self, row: Value, step: Value, apart: bool = False) -> Value:
        """Two bf16 of a row in one word. apart: rows of an odd width are not aligned to words."""
        k = self.k
        return k.bits(k.load(row, vector(I16, 2), step * 2), I32) if apart else k.load(row, I32, step)

    def _dotted(self, pair: Value) -> Value:
        """A pair in all lanes, as it is multiplied."""
        return self.k.bits(self.k.spread(pair), vector(BF16, 2 * LANES))

    def _store(self, index: Value, row: Value, column: Value) -> None:
        """Store a vector of sums; lanes after the last output are dropped."""
        k, where = self.k, self._line(row) * self.width + column
        value = self._finished(index)
        with k.builder.if_else((column + LANES <= self.width).raw) as (whole, part):
            with whole:
                k.write(value, self.out, OF_TORCH[self.shape.out], where)
            with part:
                self._put_some(value, where, self.width - column)

    def _finished(self, index: Value) -> Value:
        """A sum with its epilogue, rounded after each step as separate ops would."""
        k, of = self.k, OF_TORCH[self.shape.out]
        value = k.load(self.sums, vector(F32), index)
        if not self.shape.gated:
            return value
        if self.shape.gated == "clamped":
            return self._clamped(k.rounded(k.load(self.gates, vector(F32), index), of), k.rounded(value, of))
        if self.shape.gated == "relu2":
            kept = k.larger(k.constant(0.0, vector(F32)), k.rounded(value, of))
            return kept * kept
        gate = k.rounded(k.load(self.gates, vector(F32), index), of)
        steep = gate
        if self.shape.gated == "gelu":  # the tanh form: x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
            steep = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
        return k.rounded(gate / (k.exp(steep * -1.0) + 1.0), of) * k.rounded(value, of)

    def _clamped(self, gate: Value, up: Value) -> Value:
        """gpt-oss's activation."""
        k, of, limit = self.k, OF_TORCH[self.shape.out], self.k.constant(7.0, vector(F32))
        gate, up = k.select(gate > limit, limit, gate), k.select(up > limit, limit, up)
        up = k.select(up < limit * -1.0, limit * -1.0, up)
        opened = k.rounded(gate * k.rounded(k.constant(1.0, vector(F32)) / (k.exp(gate * -1.702) + 1.0), of), of)
        return k.rounded(up + 1.0, of) * opened

    def _put_some(self, value: Value, where: Value, lanes: Value) -> None:
        """Lane by lane."""
        k, of = self.k, OF_TORCH[self.shape.out]
        room = k.array(F32, LANES)
        k.store(value, room)
        with k.loop(0, lanes) as lane:
            k.store(k.narrowed(k.load(room, F32, lane), of), self.out, where + lane)
