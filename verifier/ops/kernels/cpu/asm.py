"""Writes kernels: Python code that runs once, and whose values represent those of the machine.

``x * y + 1`` emits a product and a sum; ``with k.loop(0, rows) as row`` emits a loop around what the block emits.
A scalar combined with a vector becomes a vector, and a Python number gets the other operand's type. The compiler
neither reorders nor contracts: sums run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.arithmetic import Arithmetic
from foresay.verifier.ops.kernels.cpu.jit import Code, Processor
from foresay.verifier.ops.kernels.cpu.values import (
    BYTES,
    I1,
    I8,
    I32,
    I64,
    LANES,
    POINTER,
    VOID,
    Operand,
    Value,
    element,
    suffix,
    vector,
)


class Variable:
    """A mutable value, held in a register."""

    def __init__(self, kernel: Kernel, initial: Value) -> None:
        self._kernel = kernel
        self._place = kernel.allocated(initial.type)
        self._type = initial.type
        self.value = initial

    @property
    def value(self) -> Value:
        """Its current value."""
        return Value(self._kernel, self._kernel.builder.load(self._place, typ=self._type))

    @value.setter
    def value(self, new: Value) -> None:
        self._kernel.builder.store(new.raw, self._place)


class Kernel(Arithmetic):
    """A function ``void(int64 *arguments, int64 thread, int64 threads)`` being written."""

    def __init__(self, name: str, processor: Processor | None = None) -> None:
        self.name, self.processor = name, processor or Processor.here()
        self.module = ir.Module(name=name)
        of = ir.FunctionType(VOID, [POINTER, I64, I64])
        self._function = ir.Function(self.module, of, name=name)
        self._allocations = ir.IRBuilder(self._function.append_basic_block("variables"))
        self._first = self._function.append_basic_block("begin")
        self.builder = ir.IRBuilder(self._first)
        self._filled: dict[tuple[ir.Type, float], Value] = {}
        self._arguments, self.thread, self.threads = (Value(self, raw) for raw in self._function.args)

    def text(self) -> str:
        """LLVM IR. Nothing can be added afterwards."""
        self.builder.ret_void()
        self._allocations.branch(self._first)
        return str(self.module)

    def code(self) -> Code:
        """Compile it. Raises CompilationFailed."""
        return Code(self.text(), self.processor)

    # -- arguments --------------------------------------------------------------------------------------------------

    def hidden(self, value: int) -> Value:
        """An int64 constant hidden from LLVM's optimizer."""
        of = ir.FunctionType(I64, [I64])
        return Value(self, self.builder.asm(of, "", "=r,0", [ir.Constant(I64, value)], side_effect=False))

    def number(self, index: int) -> Value:
        """Argument number ``index``, an int64."""
        return self.load(self._arguments, I64, index)

    def pointer(self, index: int) -> Value:
        """Argument number ``index``, an address."""
        return Value(self, self.builder.inttoptr(self.number(index).raw, POINTER))

    def counted(self, index: int) -> Value:
        """The int64 that argument number ``index`` points to, read now."""
        return self.load(self.pointer(index), I64)

    # -- control ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Operand, end: Operand, step: Operand = 1) -> Iterator[Value]:
        """``for i in range(begin, end, step)``."""
        builder, start, step = self.builder, self.index(begin), self.index(step)
        head, body, behind = (self._function.append_basic_block(name) for name in ("head", "body", "behind"))
        before = builder.block
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(start.raw, before)
        builder.cbranch(builder.icmp_signed("<", index, self.index(end).raw), body, behind)
        builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(builder.add(index, step.raw), builder.block)
        builder.branch(head)
        builder.position_at_end(behind)

    def across(self, width: Operand, body: Callable[[Value, int], None]) -> None:
        """``body(index, lanes)`` over a row: whole vectors first, then number by number."""
        whole = self.index(width) // LANES * LANES
        with self.loop(0, whole, LANES) as index:
            body(index, LANES)
        with self.loop(whole, width) as index:
            body(index, 1)

    @contextmanager
    def during(self, going: Variable) -> Iterator[None]:
        """``while going``, an int64."""
        head, body, behind = (self._function.append_basic_block(name) for name in ("head", "body", "behind"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(going.value.differs(0).raw, body, behind)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(behind)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """``if condition``."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def share(self, count: Operand) -> Iterator[Value]:
        """This thread's part of ``range(count)``, contiguous."""
        with self.loop(*self.part_of(count)) as index:
            yield index

    def part_of(self, count: Operand) -> tuple[Value, Value]:
        """Where that part begins, and where it ends."""
        whole = self.index(count)
        return whole * self.thread // self.threads, whole * (self.thread + 1) // self.threads

    def variable(self, initial: Value) -> Variable:
        """A value that changes."""
        return Variable(self, initial)

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocated(self, of: ir.Type, count: int = 1) -> Any:
        """Memory on the stack, as a raw pointer."""
        room = self._allocations.alloca(of, size=count if count > 1 else None)
        room.type = POINTER  # llvmlite still makes typed ones here
        return room

    def array(self, of: ir.Type, count: int) -> Value:
        """An array of ``count`` on the stack; a pointer."""
        room = self.allocated(of, count)
        room.align = 64
        return Value(self, room)

    def filled(self, of: ir.Type, value: float) -> Value:
        """A constant vector of equal numbers in memory; a pointer."""
        if (of, value) not in self._filled:
            room = self._filled[of, value] = self.array(of, LANES)
            nothing = ir.Constant(ir.ArrayType(I8, LANES * BYTES[of]), None)
            self._allocations.store(self.constant(value, vector(of)).raw if value else nothing, room.raw)
        return self._filled[of, value]

    def at(self, pointer: Value, index: Operand, of: ir.Type) -> Value:
        """The address of number ``index`` of an array."""
        return Value(self, self.builder.gep(pointer.raw, [self.index(index).raw], source_etype=element(of)))

    def bytes_at(self, pointer: Value, count: Operand) -> Value:
        """The address ``count`` bytes further."""
        return self.at(pointer, count, I8)

    def load(self, pointer: Value, of: ir.Type, index: Operand = 0) -> Value:
        """Element ``index`` of an array; or, for a vector type, the vector that begins there."""
        raw = self.builder.load(self.at(pointer, index, of).raw, typ=of)
        raw.align = BYTES[element(of)]
        return Value(self, raw)

    def store(self, value: Value, pointer: Value, index: Operand = 0) -> None:
        """The reverse."""
        raw = self.builder.store(value.raw, self.at(pointer, index, value.type).raw)
        raw.align = BYTES[element(value.type)]

    def counts_on(self, pointer: Value) -> Value:
        """Atomically add one to an int32; returns the old value. A thread that adds later sees the writes of those that
        added before.
        """
        return Value(self, self.builder.atomic_rmw("add", pointer.raw, ir.Constant(I32, 1), "acq_rel"))

    def copy(self, source: Value, destination: Value, count: Operand) -> None:
        """Copy ``count`` bytes."""
        count = self.index(count)
        self.call("llvm.memcpy.p0.p0.i64", VOID, destination, source, count, self.constant(0, I1))

    def prefetch(self, pointer: Value, near: int = 3) -> None:
        """Prefetch an address. near: 3 for the first-level cache; 2 for the second, which allows more prefetches."""
        self.call("llvm.prefetch.p0", VOID, pointer, *(self.constant(flag, I32) for flag in (0, near, 1)))

    def read(self, pointer: Value, of: ir.Type, index: Operand, lanes: int = LANES) -> Value:
        """Load data of another type as fp32: a vector, or for one lane a number."""
        return self.widened(self.load(pointer, of if lanes == 1 else vector(of, lanes), index))

    def some(self, pointer: Value, of: ir.Type, index: Value, end: Value, rest: float) -> Value:
        """The vector that begins at number ``index`` of an array; lanes from number ``end`` on are ``rest``."""
        there = self.counting(index) < self.integer(end, I32)
        return self.masked(self.at(pointer, index, of), of, there, rest)

    def masked(self, pointer: Value, of: ir.Type, there: Value, rest: float) -> Value:
        """The vector at an address; lanes that are not ``there`` are not read, but ``rest``."""
        whole = vector(of)
        align, instead = self.constant(BYTES[of], I32), self.constant(rest, whole)
        return self.call(f"llvm.masked.load.{suffix(whole)}.p0", whole, pointer, align, there, instead)

    def write(self, value: Value, pointer: Value, of: ir.Type, index: Operand) -> None:
        """Store fp32 as another type."""
        self.store(self.narrowed(value, of), pointer, index)
