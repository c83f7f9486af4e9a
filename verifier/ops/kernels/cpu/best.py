"""The largest of many values, and the first column that has it."""

from __future__ import annotations

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.types import F32, I32, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value

_NOWHERE = 0x7FFFFFFF


class Best:
    """Columns are seen in rising order, a vector of them at a time. Nothing is larger than minus infinity at first."""

    def __init__(self, kernel: Kernel) -> None:
        self._k = kernel
        self._values = kernel.variable(kernel.constant(-float("inf"), vector(F32)))
        self._columns = kernel.variable(kernel.constant(_NOWHERE, vector(I32)))
        self._least = kernel.variable(kernel.constant(-float("inf"), F32))

    @property
    def least(self) -> Value:
        """What a value has to be larger than to be of any interest."""
        return self._least.value

    def see(self, values: Value, columns: Value) -> None:
        """fp32 values of these columns, int32."""
        k = self._k
        better = values > self._values.value
        self._columns.value = k.select(better, columns, self._columns.value)
        self._values.value = k.select(better, values, self._values.value)
        self._least.value = k.call("llvm.vector.reduce.fmax.v16f32", F32, self._values.value)

    @property
    def value(self) -> Value:
        """The largest value."""
        return self._least.value

    @property
    def column(self) -> Value:
        """int32: where it is; of no meaning if nothing was seen."""
        k = self._k
        first = k.select(self._values.value.equals(self._least.value), self._columns.value, _NOWHERE)
        assert LANES == 16, "the name of the intrinsic"
        return k.call("llvm.vector.reduce.smin.v16i32", I32, first)
