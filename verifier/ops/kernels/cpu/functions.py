"""Functions of the numbers of blocks: Triton's, and those of kernels that a CPU computes in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.blocks import Block
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I64, Value

#: Functions of kernels whose names mean a method of the language, not their own text.
OWN = ("kept", "updated", "capped", "silu", "mean_of", "last_above", "whole_sum")


class Functions(ABC):
    """Functions that are computed number by number, of fp32 unless it is said."""

    k: Kernel

    @abstractmethod
    def made(self, of: ir.Type, make: Callable[..., Value], *blocks: Block) -> Block:
        """A block computed elementwise from blocks."""

    def broadcast_to(self, x: Block, shape: Sequence[int]) -> Block:
        """The same: shapes are matched where blocks are combined."""
        return x

    def exp(self, x: Block) -> Block:
        """The exponential."""
        return self.made(F32, self.k.exp, x)

    def log(self, x: Block) -> Block:
        """The natural logarithm."""
        return self.made(F32, self.k.log, x)

    def sqrt_rn(self, x: Block) -> Block:
        """The square root."""
        return self.made(F32, self.k.sqrt, x)

    def abs(self, x: Block) -> Block:
        """The size of a number of any type."""
        return self.made(x.dtype, lambda value: self.k.select(value < 0, value * -1, value), x)

    def capped(self, x: Block, cap: float) -> Block:
        """``cap * tanh(x / cap)``."""
        return self.made(F32, lambda value: self.k.softcapped(value, cap), x)

    def silu(self, x: Block) -> Block:
        """``x / (1 + e^-x)``."""
        return self.made(F32, lambda value: value / (self.k.exp(value * -1.0) + 1.0), x)

    def mean_of(self, total: Block, count: int) -> Block:
        """``total / count``."""
        return self.made(F32, lambda value: value * (1.0 / count), total)

    def last_above(self, word: Block, node: Block) -> Block:
        """The last node of an ancestor word before this one; -1 if there is none."""

        def last(word: Value, node: Value) -> Value:
            k = self.k
            below = word & ((k.constant(1) << (k.select(node < 0, k.constant(0), node) & 63)) - 1)
            return k.constant(63) - k.call("llvm.ctlz.i64", I64, below, k.constant(0, I1))

        return self.made(I64, last, word.to(I64), node.to(I64))
