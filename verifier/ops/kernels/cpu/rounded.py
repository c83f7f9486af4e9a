"""Integer products (:mod:`foresay.verifier.ops.linear`): rounding rows, and multiplying them.

::

    packed    unsigned numbers: signed ones have an offset of 8 (4 bits), 32 (6 bits) or 128 (8 bits)
              8 bits   [O / B][K / 4][B][4] bytes
              4 bits   [O / B][K / 8][B][4] bytes, low halves of k, .. k + 3, high ones of k + 4, .. k + 7; floats
                       (e2m1) as codes, which a table maps to twice their values plus an offset of 12
              6 bits   [O / B][K / 16][3][B][4] bytes: the lower four bits of eight k and of eight more, as above; then
                       the upper two bits of all, from those of k, .. k + 3 at the low end on
    rows      rounded, in tiles as they are multiplied at once: [R / T][N][T][P], and [R / T][N][T] for pieces

An instruction adds four products of bytes to 32 bits (AVX512-VNNI, AVX-VNNI). AVX2 multiplies pairs of bytes into 16
bits, and so does AVX-512 without VNNI (Skylake): these hold the sums of a piece with 4 bits, and of two steps with 6; 8
bits are multiplied as two halves, one after the other. Sums begin with a correction for the offset of unsigned numbers.

Legend: R rows, K inner width, O outer width, B outputs of a block, P numbers of a piece, N = K / P, T rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import llvmlite.ir as ir
import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.integer_product import OFFSET, IntegerProduct, IntegerShape
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Compiled, arena
from foresay.verifier.ops.kernels.cpu.product import MANY
from foresay.verifier.ops.kernels.cpu.values import BYTES, F32, I8, I16, I32, LANES, OF_TORCH, Value, vector
from foresay.verifier.ops.quant_groups import GROUP, LEAST
from foresay.verifier.ops.quantized import DOUBLED_E2M1
from foresay.verifier.ops.records import gate_parts

#: Numbers of rows with their own code (others are padded), of which the last is multiplied at once: with 32 wide
#: registers and byte dots, and without; and vectors of outputs with these registers.
_ROWS, _FEWER, VECTORS = (1, 2, 4, 6, 8), (1, 2, 4), 2
#: Bytes of a word.
_WORD = 4
#: The lower four bits of each byte of a word, and the two above; the largest sum that 16 bits hold.
_LOW, _HIGH, _SHORT = 0x0F0F0F0F, 0x30303030, (1 << 15) - 1
#: What LLVM calls AVX-512's forms of AVX2's instructions.
_WIDE = {"pmadd.ub.sw": "pmaddubs.w", "pmadd.wd": "pmaddw.d", "pshuf.b": "pshuf.b"}


def round_rows(x: Tensor, piece: int, offset: int, count: Tensor) -> tuple[Tensor, ...]:
    """Rows [R, K] rounded, and for each piece the initial value of its sums (int32), its scale, and its sum of inputs
    times that (fp32). offset: of the weights' numbers."""
    width, tile = x.shape[1], _sizes(Processor.here())[-1]
    rows = -(-len(x) // tile) * tile
    numbers = arena((rows, width), torch.int8)
    begun, scales, sums = (arena((rows, width // piece), of) for of in (torch.int32, torch.float32, torch.float32))
    _rounding(x.dtype, piece, offset, tile)(x, numbers, begun, scales, sums, count, width)
    return numbers, begun, scales, sums


@Compiled
def _rounding(dtype: torch.dtype, piece: int, offset: int, tile: int) -> Kernel:
    k, of = Kernel("round_rows"), OF_TORCH[dtype]
    x, numbers, begun, scales, sums = map(k.pointer, range(5))
    width = k.number(6)
    with k.share(k.counted(5)) as row:
        first = row // tile * tile * (width // piece) + row % tile
        with k.loop(0, width // GROUP) as group:
            values = [k.read(x, of, row * width + group * GROUP + at, LANES) for at in range(0, GROUP, LANES)]
            scale, whole = _rounded(k, values)
            words = [k.integer(each, I32) for each in whole]
            for at in range(0, GROUP, piece):
                those = range(at % LANES, at % LANES + min(piece, LANES))
                source = words[0] + words[1] if piece == GROUP else words[at // LANES]
                total = k.total(k.shuffled(source, source, those))
                where = first + (group * (GROUP // piece) + at // piece) * tile
                k.store(total * -offset, begun, where)
                k.store(scale, scales, where)
                k.store(Value(k, k.builder.sitofp(total.raw, F32)) * scale, sums, where)
                for part in range(at, at + piece, min(piece, LANES)):
                    lanes = range(part % LANES, part % LANES + min(piece, LANES))
                    found = k.shuffled(whole[part // LANES], whole[part // LANES], lanes)
                    k.store(found, k.bytes_at(numbers, where * piece + (part - at)))
    return k


def _rounded(k: Kernel, values: list[Value]) -> tuple[Value, list[Value]]:
    """The scale of a group, and its numbers."""
    # Absolute values have the same order as integers, and NaN is the largest.
    sizes = [k.bits(value, vector(I32)) & 0x7FFFFFFF for value in values]
    most = k.call("llvm.vector.reduce.smax.v16i32", I32, k.larger(*sizes))
    size, infinity = k.bits(most, F32), 0x7F800000
    scale = k.select(most.equals(infinity), float("nan"), size / 127.0)
    factor = k.select((most < infinity) & (size >= LEAST), k.constant(127.0, F32) / size, 0.0)
    return scale, [k.narrowed(value * factor, I8) for value in values]


def _sizes(processor: Processor) -> tuple[int, ...]:
    """The numbers of rows for which there is code."""
    return _ROWS if processor.wide and processor.has_byte_dots else _FEWER


@Compiled
def kernel_of(shape: IntegerShape, most: int = MANY) -> Kernel:
    """The kernel of this shape, whose inputs are rounded rows. most: as of
    :meth:`~foresay.verifier.ops.kernels.cpu.product.ProductKernel.write`."""
    return _RoundedProduct(Kernel("multiply"), shape).write(most)


class _RoundedProduct(IntegerProduct):
    """Writes the kernel. Further arguments: the pieces' data of :func:`round_rows`. tile: T."""

    far, near = 64, 16
    #: Bytes: how far ahead one line of each piece is prefetched too, so that the address of its page is known in time.
    page_ahead = 1 << 16

    def __init__(self, kernel: Kernel, shape: IntegerShape) -> None:
        super().__init__(kernel, shape)
        self.begun, self.factors, self.inputs = map(kernel.pointer, range(17, 20))
        self.sizes, self.one = _sizes(kernel.processor), kernel.processor.has_byte_dots
        self.at_once = self.tile = self.sizes[-1]
        self.pieces = self.inner // shape.piece

    def _in_strip(self) -> Value:
        return self.k.constant(self.strip) // (self.pieces * self.size * gate_parts(self.shape.gated)) + 1

    def _prefetch(self, line: Value, size: int) -> None:
        super()._prefetch(line, size)
        self.k.prefetch(self.k.bytes_at(line, self.page_ahead), 2)

    def _products(self, block: Value, row: Value, left: Value, room: Value) -> None:
        sizes = [rows for rows in self.sizes if rows <= self.at_once]
        for fewer, rows in zip((0, *sizes), sizes, strict=False):
            with self.k.when((left > fewer) & (left <= rows)):
                self._sum(block, row, rows, room)

    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        k, piece = self.k, self.shape.piece
        self._begin(block, rows, room)
        inside, first = self.group // piece, row // self.tile * self.tile * self.pieces + row % self.tile
        with k.loop(0, self.groups) as group, k.loop(0, inside) as at:
            index = group * inside + at
            there = first + index * self.tile
            line = k.bytes_at(self.weight, (block * self.pieces + index) * self.size)
            self._prefetch(line, self.size)
            values = []
            for number, sums in enumerate(self._dots(line, there, rows)):
                factor = k.load(self.factors, F32, there + number)
                values += [k.as_float(each) * factor for each in sums]
            taken = [k.spread(k.load(self.inputs, F32, there + number)) for number in range(rows)]
            self._fold([*values, *taken], rows, block, group, room)

    def _dots(self, line: Value, there: Value, rows: int) -> list[list[Value]]:
        """int32: the sums of a piece, row by row, vector by vector. there: the first row's piece."""
        k = self.k
        begun = [k.spread(k.load(self.begun, I32, there + number)) for number in range(rows)]
        inputs = [k.bytes_at(self.x, (there + number) * self.shape.piece) for number in range(rows)]
        totals = [[each] * self.vectors for each in begun]
        if self.one:
            self._add_steps(totals, inputs, enumerate(self._bytes_of(line)))
            return totals
        if not self.shape.signed:
            totals = [[k.constant(0, vector(I32))] * self.vectors for _ in range(rows)]
        for factor, steps in self._short(line):
            zero = k.bits(k.constant(0, vector(I32)), vector(I16, 2 * LANES))
            sums = [[zero] * self.vectors for _ in range(rows)]
            self._add_steps(sums, inputs, steps)
            ones = k.constant(factor, zero.type)
            totals = [
                [total + self._with("pmadd.wd", I32, each, ones) for total, each in zip(*row, strict=True)]
                for row in zip(totals, sums, strict=True)
            ]
        return totals

    def _add_steps(
        self, sums: list[list[Value]], inputs: list[Value], steps: Iterable[tuple[int, list[Value]]]
    ) -> None:
        """Add products of four numbers each, of these steps of a piece with their words, in place."""
        for step, columns in steps:
            for row, source in zip(sums, inputs, strict=True):
                factor = self.k.spread(self.k.load(source, I32, step))
                row[:] = [self._dot(total, column, factor) for total, column in zip(row, columns, strict=True)]
            if not self.one:
                sums[:] = self._in_order(sums)

    def _short(self, line: Value) -> Iterator[tuple[int, Iterable[tuple[int, list[Value]]]]]:
        """Steps, with their words, whose sums fit in 16 bits together, and what these sums count."""
        if self.shape.bits == 8:
            for half in range(2):
                again = self.k.bytes_at(line, self.k.hidden(0))  # words are read twice: registers do not hold them
                words = enumerate(self._bytes_of(again))
                yield 1 << 4 * half, ((step, [each >> 4 * half & _LOW for each in those]) for step, those in words)
            return
        most = 2 * OFFSET if self.shape.e2m1 else (1 << self.shape.bits) - 1
        steps = enumerate(self._bytes_of(line))
        while batch := list(islice(steps, _SHORT // (2 * 127 * most))):
            yield 1, batch

    def _bytes_of(self, line: Value) -> Iterator[list[Value]]:
        """A piece's words of four unsigned numbers, vector by vector."""
        if self.shape.bits == 6:
            for step in range(0, self.shape.piece * 3 // 16, 3):
                yield from self._sixes(*(self._words(line, step + at) for at in range(3)))
            return
        for step in range(self.shape.piece * self.shape.bits // (8 * _WORD)):
            words = self._words(line, step)
            if self.shape.bits == 8:
                yield words
                continue
            for halves in ([word & _LOW for word in words], [word >> 4 & _LOW for word in words]):
                yield [self._doubled(word) for word in halves] if self.shape.e2m1 else halves

    def _words(self, line: Value, step: int) -> list[Value]:
        """Those in a place of the layout."""
        first = self.k.bytes_at(line, step * self.shape.block * _WORD)
        return [self.k.load(first, vector(I32), at * LANES) for at in range(self.vectors)]

    def _sixes(self, *words: list[Value]) -> Iterator[list[Value]]:
        """Four steps of 6 bits. words: two of lower bits, one of upper ones."""
        *lower, upper = words
        for half, shifted in enumerate((-4, -2, 0, 2)):
            low = [each >> 4 * (half % 2) & _LOW for each in lower[half // 2]]
            high = [(each << -shifted if shifted < 0 else each >> shifted) & _HIGH for each in upper]
            yield [one | other for one, other in zip(low, high, strict=True)]

    def _doubled(self, words: Value) -> Value:
        """4-bit floats, doubled and unsigned: each byte is looked up in a table."""
        k, table = self.k, [int(number) + OFFSET for number in DOUBLED_E2M1]
        numbers = Value(k, ir.Constant(vector(I8, _WORD * LANES), table * (_WORD * LANES // len(table))))
        return k.bits(self._with("pshuf.b", I8, numbers, k.bits(words, numbers.type)), words.type)

    def _dot(self, total: Value, weights: Value, inputs: Value) -> Value:
        """Add four products in each lane; without byte dots, two in each half of it."""
        bytes_of = [self.k.bits(each, vector(I8, _WORD * LANES)) for each in (weights, inputs)]
        if not self.one:
            return total + self._with("pmadd.ub.sw", I16, *bytes_of)
        if self.k.processor.wide:
            return self.k.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, *bytes_of)
        return self._by_halves("llvm.x86.avx512.vpdpbusd.256", I32, total, *bytes_of)

    def _in_order(self, sums: list[list[Value]]) -> list[list[Value]]:
        """The same, which LLVM does not rearrange: its trees of sums would not fit in the registers."""
        k, wide = self.k, self.k.processor.wide
        of, parts = vector(I16, 2 * LANES if wide else LANES), (0,) if wide else (0, LANES)
        whole = [each for row in sums for each in row]
        halves = [k.shuffled(each, each, range(at, at + of.count)) for each in whole for at in parts]
        several = ir.FunctionType(ir.LiteralStructType([of] * len(halves)), [of] * len(halves))
        names = ",".join(["=v" if wide else "=x"] * len(halves) + [str(at) for at in range(len(halves))])
        made = k.builder.asm(several, "", names, [half.raw for half in halves], side_effect=False)
        found = iter([Value(k, k.builder.extract_value(made, at)) for at in range(len(halves))])
        if wide:
            return [[next(found) for _ in row] for row in sums]
        return [[k.shuffled(next(found), next(found), range(2 * LANES)) for _ in row] for row in sums]

    def _with(self, name: str, of: ir.Type, *values: Value) -> Value:
        """An instruction of AVX2 for bytes, or that of AVX-512. of: its result's type."""
        if not self.k.processor.wide:
            return self._by_halves(f"llvm.x86.avx2.{name}", of, *values)
        return self.k.call(f"llvm.x86.avx512.{_WIDE[name]}.512", vector(of, 64 // BYTES[of]), *values)

    def _by_halves(self, name: str, of: ir.Type, *values: Value) -> Value:
        """A 256-bit instruction, twice."""
        k, found = self.k, []
        for half in range(2):
            lanes = [range(half * each.type.count // 2, (half + 1) * each.type.count // 2) for each in values]
            parts = [k.shuffled(each, each, those) for each, those in zip(values, lanes, strict=True)]
            found.append(k.call(name, vector(of, 32 // BYTES[of]), *parts))
        low, high = found
        return k.shuffled(low, high, range(64 // BYTES[of]))
