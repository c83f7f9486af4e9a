"""Products with a packed weight: each sum runs over k in order, in one accumulator, whatever rows stand beside it.

::

    packed   [O / B][K / 2][B][2] where pairs of bf16 are multiplied, [O / B][K][B] where single numbers are
    loop     blocks of B outputs (shared among the threads), then groups of up to 6 rows, then k: so a block of weights
             is read from memory once, and from the cache for the other groups

A group's sums lie in registers: B is 64 and there are 24 of them where registers are 32 and wide, else B is 16.

Legend: R rows, K inner width, O outer width, B outputs of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from verifier.ops.kernels.cpu.asm import Kernel, Variable
from verifier.ops.kernels.cpu.jit import Processor
from verifier.ops.kernels.cpu.launch import Compiled
from verifier.ops.kernels.cpu.types import BF16, F32, I16, I32, LANES, OF_TORCH, vector
from verifier.ops.kernels.cpu.values import Value

#: Rows whose sums are held at once, and how far ahead of the sums weights are asked for.
_GROUP, _AHEAD_BYTES = 6, 2048


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [O, K] as the kernel reads it. data: of its own dtype. bias: fp32[O, filled up to blocks] or None.

    gated: the first half of the outputs are gates of the second: their blocks take turns. outer: O; columns that fill
    the last block up are no outputs. pairs: whether k lies in pairs.
    """

    data: Tensor
    bias: Tensor | None
    inner: int
    outer: int
    gated: bool
    pairs: bool

    @property
    def block(self) -> int:
        """B."""
        return int(self.data.shape[2])

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, gated: bool, processor: Processor | None = None) -> PackedWeight:
        """Pack a weight [O, K] of which 16 or 32 bits are kept."""
        processor = processor or Processor.here()
        pairs, block = weight.dtype is torch.bfloat16, 4 * LANES if processor.wide else LANES
        turns = 2 if gated else 1
        data = torch.stack([_packed(part, block, pairs) for part in weight.chunk(turns)], dim=1).flatten(0, 1)
        if bias is not None:
            parts = [functional.pad(part.float(), (0, -len(part) % block)) for part in bias.chunk(turns)]
            bias = torch.stack([part.view(-1, block) for part in parts], dim=1).flatten().contiguous()
        return cls(data, bias, weight.shape[1], len(weight), gated, pairs)

    def plain(self) -> Tensor:
        """[O, K]: the weight as it was."""
        blocks = self.data.unflatten(0, (-1, 2 if self.gated else 1))
        inside = (0, 2, 1, 3) if self.pairs else (0, 2, 1)
        parts = [
            part.permute(*inside).reshape(-1, part.shape[1] * (2 if self.pairs else 1)) for part in blocks.unbind(1)
        ]
        return torch.cat([part[: self.outer // len(parts), : self.inner] for part in parts])

    def plain_bias(self) -> Tensor:
        """fp32[O]: the bias as it was."""
        assert self.bias is not None
        parts = self.bias.view(-1, 2 if self.gated else 1, self.block).unbind(1)
        return torch.cat([part.flatten()[: self.outer // len(parts)] for part in parts])


def _packed(weight: Tensor, block: int, pairs: bool) -> Tensor:
    filled = functional.pad(weight, (0, weight.shape[1] % 2 if pairs else 0, 0, -len(weight) % block))
    shaped = filled.view(-1, block, filled.shape[1])
    numbers: Tensor = shaped.unflatten(2, (-1, 2)) if pairs else shaped
    return numbers.transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for. weight, compute, out: dtypes of the weight, of inputs and of what comes out.

    odd: whether the last of a row's inputs is half of a pair.
    """

    block: int
    weight: torch.dtype
    compute: torch.dtype
    out: torch.dtype
    gated: bool
    bias: bool
    odd: bool


def multiply(x: Tensor, weight: PackedWeight, out: Tensor, count: Tensor) -> None:
    """``out = x @ weight.T + bias``, rounded; of a gated weight ``silu(gate) * up``.

    x: [R, K], out: [R, O or O / 2], contiguous. count: int64[1], of how many rows; a row's bits do not depend on it.
    """
    bias, odd = weight.bias is not None, weight.pairs and weight.inner % 2 == 1
    _kernel(Shape(weight.block, weight.data.dtype, x.dtype, out.dtype, weight.gated, bias, odd))(
        x, weight.data, out, 0 if weight.bias is None else weight.bias, count,
        len(weight.data) // (2 if weight.gated else 1), out.shape[1], x.shape[1],
    )  # fmt: skip


@Compiled
def _kernel(shape: Shape) -> Kernel:
    return _Product(Kernel("multiply"), shape).write()


class _Product:
    """Writes the kernel. Arguments: x, weight, out, bias, count, blocks (or pairs of them), widths of out and x."""

    def __init__(self, kernel: Kernel, shape: Shape) -> None:
        self.k, self.shape = kernel, shape
        self.x, self.weight, self.out, self.bias = (kernel.pointer(index) for index in range(4))
        self.rows, self.blocks, self.width, self.inner = kernel.counted(4), *(kernel.number(at) for at in (5, 6, 7))
        self.vectors = shape.block // LANES
        self.pairs = shape.weight is torch.bfloat16
        self.dot = self.pairs and shape.compute is torch.bfloat16 and kernel.processor.multiplies_bf16
        self.sums, self.gates = (kernel.array(F32, _GROUP * shape.block) for _ in range(2))

    def write(self) -> Kernel:
        k = self.k
        with k.share(self.blocks) as block, k.loop(0, self.rows, _GROUP) as row:
            if self.shape.gated:
                self._products(block * 2, row, self.gates)
                self._products(block * 2 + 1, row, self.sums)
            else:
                self._products(block, row, self.sums)
            with k.loop(0, k.smallest(self.rows - row, _GROUP)) as number, k.loop(0, self.vectors) as at:
                self._store(number * self.shape.block + at * LANES, row + number, block * self.shape.block + at * LANES)
        return k

    def _products(self, block: Value, row: Value, room: Value) -> None:
        """The sums of one block of outputs for the rows of a group, into ``room``."""
        left = self.k.smallest(self.rows - row, _GROUP)
        for rows in range(1, _GROUP + 1):
            with self.k.when(left.equals(rows)):
                for place, total in enumerate(self._summed(block, row, rows)):
                    self.k.store(total.value, room, place * LANES)

    def _summed(self, block: Value, row: Value, rows: int) -> list[Variable]:
        """The sums of so many rows, row by row, vector by vector."""
        k, shape = self.k, self.shape
        steps = self.inner // 2 if self.pairs else self.inner
        item = I32 if self.pairs else OF_TORCH[shape.weight]
        weights = k.at(self.weight, block * (steps + int(shape.odd)) * shape.block, item)
        inputs = [k.at(self.x, (row + number) * self.inner, OF_TORCH[shape.compute]) for number in range(rows)]
        sums = [self._begun(block, at) for _ in range(rows) for at in range(self.vectors)]
        for step in self._steps(steps):
            self._add(sums, k.at(weights, step * shape.block, item), inputs, step)
        if shape.odd:
            self._add(sums, k.at(weights, steps * shape.block, item), inputs, steps, half=True)
        return sums

    def _add(self, sums: list[Variable], line: Value, rows: list[Value], step: Value, half: bool = False) -> None:
        """The terms of one step: weights that stand in a line, times each row's inputs."""
        columns = self._columns(line)
        for number, row in enumerate(rows):
            factors = self._inputs(row, step, half)
            for at, column in enumerate(columns):
                total = sums[number * self.vectors + at]
                for factor, weight in zip(factors, column, strict=True):
                    total.value = self._added(total.value, factor, weight)

    def _steps(self, steps: Value) -> Iterator[Value]:
        """The order of the terms."""
        with self.k.loop(0, steps) as step:
            yield step

    def _begun(self, block: Value, at: int) -> Variable:
        """A sum before its first term: the bias."""
        k = self.k
        if not self.shape.bias:
            return k.variable(k.constant(0.0, vector(F32)))
        return k.variable(k.load(self.bias, vector(F32), block * self.shape.block + at * LANES))

    def _columns(self, line: Value) -> list[list[Value]]:
        """The weights of one step, vector by vector: a pair of bf16 for each output, or numbers in fp32, one or two."""
        size = 4 if self.pairs else self.shape.weight.itemsize
        for at in range(self.vectors):
            self.k.prefetch(self.k.bytes_at(line, _AHEAD_BYTES + at * LANES * size))
        return [self._weights(line, at * LANES) for at in range(self.vectors)]

    def _weights(self, line: Value, at: int) -> list[Value]:
        k = self.k
        if not self.pairs:
            return [k.read(line, OF_TORCH[self.shape.weight], at)]
        words = k.load(line, vector(I32), at)
        return [k.bits(words, vector(BF16, 2 * LANES))] if self.dot else self._halves(words)

    def _halves(self, words: Value) -> list[Value]:
        """Two bf16 in each word, as fp32."""
        of = self.k.like(words, F32)
        return [self.k.bits(words << 16, of), self.k.bits(words & -65536, of)]

    def _inputs(self, row: Value, step: Value, half: bool = False) -> list[Value]:
        """The same of a row's inputs, each in all lanes. half: behind the first of the pair the row ends."""
        k, compute = self.k, OF_TORCH[self.shape.compute]
        if self.dot:
            return [k.bits(k.spread(self._pair(row, step, half)), vector(BF16, 2 * LANES))]
        if self.pairs and compute is BF16:
            return [k.spread(each) for each in self._halves(self._pair(row, step, half))]
        places = [step * 2, step * 2 + 1] if self.pairs else [step]
        found = [k.widened(k.load(row, compute, place)) for place in places[: 1 if half else None]]
        return [k.spread(each) for each in (*found, *[k.constant(0.0, F32)] * half)]

    def _pair(self, row: Value, step: Value, half: bool) -> Value:
        """Two bf16 in one word. Rows of an odd width do not begin where words do."""
        k = self.k
        if half:
            return k.integer(k.load(row, I16, step * 2), I32) & 0xFFFF
        return k.bits(k.load(row, vector(I16, 2), step * 2), I32) if self.shape.odd else k.load(row, I32, step)

    def _added(self, total: Value, factor: Value, weight: Value) -> Value:
        if self.dot:
            return self.k.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, factor, weight)
        return self.k.fma(factor, weight, total)

    def _store(self, place: Value, row: Value, column: Value) -> None:
        """A vector of sums goes where it belongs; lanes behind the last output nowhere."""
        k, where = self.k, row * self.width + column
        value = self._finished(place)
        with k.builder.if_else((column + LANES <= self.width).raw) as (whole, part):
            with whole:
                k.write(value, self.out, OF_TORCH[self.shape.out], where)
            with part:
                self._put_some(value, where, self.width - column)

    def _finished(self, place: Value) -> Value:
        """A sum, or of a gated product ``silu(gate) * up``, rounded after each step as the separate steps do."""
        k, of = self.k, OF_TORCH[self.shape.out]
        value = k.load(self.sums, vector(F32), place)
        if not self.shape.gated:
            return value
        gate = k.rounded(k.load(self.gates, vector(F32), place), of)
        silu = gate / (k.exp(gate * -1.0) + 1.0)
        return k.rounded(silu, of) * k.rounded(value, of)

    def _put_some(self, value: Value, where: Value, lanes: Value) -> None:
        """Lane by lane."""
        k, of = self.k, OF_TORCH[self.shape.out]
        room = k.array(F32, LANES)
        k.store(value, room)
        with k.loop(0, lanes) as lane:
            k.store(k.narrowed(k.load(room, F32, lane), of), self.out, where + lane)
