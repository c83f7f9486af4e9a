"""Writes the kernels that multiply with quantised weights, laid out as in
:mod:`foresay.verifier.ops.kernels.cpu.integers`.

A 4-bit float (e2m1) times its group's 8-bit scale is exact in bf16, or rounded to it if the row has a step too: so it
is computed in registers, and each sum runs over k as with floats (:mod:`~foresay.verifier.ops.kernels.cpu.linear`). It
has the same bits as with the weight dequantised to bf16.

Legend: B outputs of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import llvmlite.ir as ir
import torch

from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.product import MANY, ProductKernel, ProductShape
from foresay.verifier.ops.kernels.cpu.values import (
    BF16,
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    OF_TORCH,
    Operand,
    Value,
    vector,
)
from foresay.verifier.ops.quantized import DOUBLED_E2M1, E8M0, FP8

#: The outputs of a block are in the four quarters of a word: output 16 j + i in quarter j of word i.
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class IntegerShape(ProductShape):
    """scale: dtype of the scales. shifted: whether there are zero points. minimums, steps: whether there are any.
    floats: whether numbers are e4m3. piece: numbers of a piece if inputs are rounded
    (:mod:`~foresay.verifier.ops.kernels.cpu.rounded`), else 0.
    """

    bits: int
    scale: torch.dtype
    shifted: bool
    pairs: bool
    minimums: bool = False
    steps: bool = False
    floats: bool = False
    piece: int = 0

    @property
    def signed(self) -> bool:
        """Whether values have a sign."""
        return self.bits != 4 or not self.minimums

    @property
    def e2m1(self) -> bool:
        """Whether numbers are 4-bit floats."""
        return self.bits == 4 and self.scale in (E8M0, FP8)

    @property
    def sums(self) -> bool:
        """Whether a group's sum of inputs is needed."""
        return self.shifted or self.minimums


@Compiled
def kernel_of(shape: IntegerShape, most: int = MANY) -> Kernel:
    """The kernel of this shape. most: as of :meth:`~foresay.verifier.ops.kernels.cpu.product.ProductKernel.write`."""
    return (E2m1Product if shape.e2m1 else IntegerProduct)(Kernel("multiply"), shape).write(most)


class IntegerProduct(ProductKernel):
    """Writes the kernel. Further arguments: scales, zero points, minimums, steps, steps of minimums; groups, numbers of
    a group, spans, groups of a span.

    terms: of a step, pairs counted as one.
    """

    shape: IntegerShape
    ahead = 8192

    def __init__(self, kernel: Kernel, shape: IntegerShape) -> None:
        super().__init__(kernel, shape)
        self.scales, self.zeros, self.minimums, self.steps, self.minimum_steps = map(kernel.pointer, range(8, 13))
        self.groups, self.group, self.spans, self.span = map(kernel.number, range(13, 17))
        self.terms = 8 if shape.bits == 4 and not shape.pairs else 1
        self.wide = 2 if shape.pairs else self.terms  # k of a step
        self.table = _BF16 if shape.signed else _UNSIGNED_BF16
        self.size = shape.block * (shape.piece or self.wide) * shape.bits // 8  # bytes of a step, or of a piece
        if shape.sums:
            self.at_once -= 2 if self.vectors == 3 else 1  # the sums of inputs take registers too

    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        k, steps = self.k, self.group // self.wide
        self._begin(block, rows, room)
        with k.loop(0, self.groups) as group:
            sums = self._summed(block, self._rows(row, rows), steps, group * steps)
            self._fold([each.value for each in sums], rows, block, group, room)

    def _begin(self, block: Value, rows: int, room: Value) -> None:
        """Sums before their first term."""
        for number in range(rows):
            for at in range(self.vectors):
                self.k.store(self._begun(block, at), room, (number * self.vectors + at) * LANES)

    def _summed(self, block: Value, rows: list[Value], steps: Value, first: Value) -> list[Variable]:
        """The sums of a group's terms, row by row, vector by vector; followed by those of the inputs. first: step."""
        k = self.k
        count = len(rows) * (self.vectors + int(self.shape.sums))
        sums = [k.variable(k.constant(0.0, vector(F32))) for _ in range(count)]
        weights = k.bytes_at(self.weight, (block * (self.inner // self.wide) + first) * self.size)
        for step in self._steps(steps):
            line = k.bytes_at(weights, step * self.size)
            self._prefetch(line, self.size)
            for term, columns in enumerate(self._columns(line)):
                self._add(sums, columns, rows, (first + step) * self.terms + term)
        return sums

    def _add(self, sums: list[Variable], columns: list[Value], rows: list[Value], index: Value) -> None:
        """One term of each sum."""
        for number, row in enumerate(rows):
            factor = self._input(row, index)
            for at, column in enumerate(columns):
                self._added(sums[number * self.vectors + at], factor, column)
            if self.shape.sums:
                self._added(sums[len(rows) * self.vectors + number], factor, self._ones())

    def _fold(self, sums: list[Value], rows: int, block: Value, group: Value, room: Value) -> None:
        """A group's sums times their scales, added to the totals."""
        k, shape = self.k, self.shape
        first = (block * self.groups + group) * shape.block
        step = (block * self.spans + group // self.span) * shape.block if shape.steps else None
        for at in range(self.vectors):
            where, steps = first + at * LANES, None if step is None else step + at * LANES
            scale = self._scale(where, steps)
            minimum = self._stepped(self.minimums, self.minimum_steps, where, steps) if shape.minimums else None
            for number in range(rows):
                index, value = (number * self.vectors + at) * LANES, sums[number * self.vectors + at]
                inputs = sums[rows * self.vectors + number] * -1.0 if shape.sums else None
                if shape.shifted and inputs is not None:
                    value = k.fma(inputs, self._bytes_at(self.zeros, where), value)
                total = k.fma(value, scale, k.load(room, vector(F32), index))
                k.store(total if minimum is None or inputs is None else k.fma(inputs, minimum, total), room, index)

    def _scale(self, where: Value, steps: Value | None) -> Value:
        if self.shape.e2m1:
            half = self._half_scale(where)
            return half if steps is None else half * self.k.load(self.steps, vector(F32), steps)
        if steps is None:
            return self.k.read(self.scales, OF_TORCH[self.shape.scale], where)
        return self._stepped(self.scales, self.steps, where, steps)

    def _stepped(self, multiples: Value, steps: Value, where: Value, there: Value | None) -> Value:
        """Scales or minimums, times their steps. there: the span's position; None if they are not multiples."""
        if there is None:
            return self.k.read(multiples, F16, where)
        return self._bytes_at(multiples, where) * self.k.read(steps, F16, there)

    def _half_scale(self, where: Value) -> Value:
        """Half of 8-bit scales as fp32: of e4m3, or of only exponents, the least two of which give denormals."""
        k = self.k
        if self.shape.scale is FP8:
            return self._fp8_at(self.scales, where) * 0.5
        exponents = k.integer(k.load(self.scales, vector(I8), where), I32) & 0xFF
        least = k.select(exponents.equals(0), k.constant(1 << 21, vector(I32)), 1 << 22)
        return k.bits(k.select(exponents < 2, least, (exponents - 1) << 23), vector(F32))

    def _bytes_at(self, pointer: Value, where: Operand) -> Value:
        """16 numbers of int8 as fp32."""
        return self.k.as_float(self.k.integer(self.k.load(pointer, vector(I8), where), I32))

    def _input(self, row: Value, index: Value) -> Value:
        """A number of a row, or a pair of them, in all lanes."""
        k = self.k
        if self.shape.pairs:
            return self._dotted(self._pair(row, index))
        return k.spread(k.widened(k.load(row, OF_TORCH[self.shape.compute], index)))

    def _ones(self) -> Value:
        return self.k.constant(1.0, vector(BF16, 2 * LANES) if self.shape.pairs else vector(F32))

    def _columns(self, line: Value) -> Iterator[list[Value]]:
        """The weights of each term of a step, vector by vector."""
        vectors = range(self.vectors)
        if self.shape.bits == 8:
            of_pairs, alone = self._pairs_of_bytes, self._bytes
            if self.shape.floats:
                of_pairs, alone = self._pairs_of_fp8, self._fp8
            yield [(of_pairs if self.shape.pairs else alone)(line, at) for at in vectors]
        elif self.shape.pairs:
            yield self._quarters(self.k.load(line, vector(I16, 2 * LANES)))
        else:
            words = [self.k.load(line, vector(I32), at * LANES) for at in vectors]
            for term in range(self.terms):
                yield [self._eighth(word, term) for word in words]

    def _bytes(self, line: Value, at: int) -> Value:
        """16 numbers as fp32."""
        return self._bytes_at(line, at * LANES)

    def _pairs_of_bytes(self, line: Value, at: int) -> Value:
        """16 pairs as bf16."""
        first, second = (self.k.bits(self._bytes(line, 2 * at + part), vector(I32)) for part in range(2))
        return self.k.bits((first >> 16) | second, vector(BF16, 2 * LANES))

    def _fp8(self, line: Value, at: int) -> Value:
        return self._fp8_at(line, at * LANES)

    def _fp8_at(self, pointer: Value, where: Operand) -> Value:
        """16 8-bit floats as fp32, whose exponents are 120 lower: a product shifts them, and makes denormals normal."""
        k = self.k
        words = k.integer(k.load(pointer, vector(I8), where), I32)  # copies of the sign are above
        return k.bits((words << 20) & -0x78100000, vector(F32)) * 2.0**120

    def _pairs_of_fp8(self, line: Value, at: int) -> Value:
        """16 pairs of them as bf16: the eight that are not normal are looked up in a table by an instruction."""
        k, of = self.k, vector(I16, 2 * LANES)
        words = k.integer(k.load(line, vector(I8, 2 * LANES), at * 2 * LANES), I16)
        size = words & 0x7F
        table = Value(k, ir.Constant(of, _SMALL_FP8 * 4))
        small = k.call("llvm.x86.avx512.permvar.hi.512", of, table, size)
        found = k.select(size < 8, small, (size << 4) + (120 << 7)) | (words & -0x8000)
        return k.bits(found, vector(BF16, 2 * LANES))

    def _quarters(self, words: Value) -> list[Value]:
        """Four bits of each word as bf16: looked up in a table by an instruction, by the lowest five bits."""
        k, of = self.k, vector(I16, 2 * LANES)
        table = Value(k, ir.Constant(of, [self.table[index % 16] for index in range(2 * LANES)]))
        found = [k.call("llvm.x86.avx512.permvar.hi.512", of, table, words >> 4 * at) for at in range(QUARTERS)]
        return [k.bits(each, vector(BF16, 2 * LANES)) for each in found]

    def _eighth(self, words: Value, term: int) -> Value:
        """Four bits of each word as fp32: shifted to the upper end first, to keep a sign if there is one."""
        k = self.k
        upper = Value(k, (words << (28 - 4 * term)).raw)
        if not self.shape.signed:
            return k.as_float(upper >> 28)
        return k.as_float(Value(k, k.builder.ashr(upper.raw, k.constant(28, upper.type).raw)))


#: The bits of -8 .. 7 as bf16, by their own lowest four bits.
_BF16 = torch.tensor([*range(8), *range(-8, 0)]).bfloat16().view(torch.int16).tolist()
#: The same for unsigned numbers.
_UNSIGNED_BF16 = torch.arange(16).bfloat16().view(torch.int16).tolist()
#: The bits of e4m3's zero and denormals, 0 .. 7 times 2^-9, as bf16.
_SMALL_FP8 = (torch.arange(8) * 2.0**-9).bfloat16().view(torch.int16).tolist()


#: The offset of doubled e2m1 numbers that makes them unsigned.
OFFSET = 12


class E2m1Product(IntegerProduct):
    """Writes the kernel for e2m1, with the same arguments; numbers are doubled. factors: half the scales of a group,
    vector by vector."""

    factors: list[Value]

    def __init__(self, kernel: Kernel, shape: IntegerShape) -> None:
        super().__init__(kernel, shape)
        self.table = torch.tensor(DOUBLED_E2M1).bfloat16().view(torch.int16).tolist()

    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        k, steps, inputs = self.k, self.group // self.wide, self._rows(row, rows)
        sums = [k.variable(self._begun(block, at)) for _ in range(rows) for at in range(self.vectors)]
        weights = k.bytes_at(self.weight, block * (self.inner // self.wide) * self.size)
        with k.loop(0, self.groups) as group:
            first, row = ((block * count + at) * self.shape.block for count, at in ((self.groups, group), (1, 0)))
            of_row = [row + at * LANES if self.shape.steps else None for at in range(self.vectors)]
            self.factors = [self._scale(first + at * LANES, step) for at, step in enumerate(of_row)]
            with k.loop(group * steps, (group + 1) * steps) as step:
                line = k.bytes_at(weights, step * self.size)
                self._prefetch(line, self.size)
                for term, columns in enumerate(self._columns(line)):
                    self._add(sums, columns, inputs, step * self.terms + term)
        for index, total in enumerate(sums):
            k.store(total.value, room, index * LANES)

    def _columns(self, line: Value) -> Iterator[list[Value]]:
        for columns in super()._columns(line):
            yield [self._scaled(column, factor) for column, factor in zip(columns, self.factors, strict=True)]

    def _scaled(self, column: Value, factor: Value) -> Value:
        """The weights of a vector of outputs: numbers, or pairs, times the outputs' scales."""
        k = self.k
        if not self.shape.pairs:
            return self._exact(column * factor)
        halves = self._halves(k.bits(column, vector(I32)))
        low, high = (k.bits(self._exact(half * factor), vector(I32)) for half in halves)
        return k.bits((low >> 16) | high, vector(BF16, 2 * LANES))

    def _exact(self, weight: Value) -> Value:
        """A product that is a bf16: with steps it is rounded to one."""
        return self.k.rounded(weight, BF16) if self.shape.steps else weight

    def _eighth(self, words: Value, term: int) -> Value:
        """Four bits of each word as fp32, whose exponents are 127 lower: a product shifts them."""
        k, at = self.k, 4 * term
        sign, size = (words << (28 - at)) & -0x80000000, ((words >> at) & 7) << 22
        return k.bits(sign | size, vector(F32)) * 2.0**127
