"""What is done to each row for itself: taking rows of a table, norms."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.types import F32, I64, LANES, OF_TORCH, vector
from foresay.verifier.ops.kernels.cpu.values import Value


def take_rows(table: Tensor, places: Tensor, out: Tensor, count: Tensor) -> None:
    """``out[n] = table[places[n]]`` for the first ``count`` rows. table: [N, ..], out: [R, ..], contiguous."""
    _taking()(table, places, out, count, table[0].numel() * table.element_size())


def take_columns(x: Tensor, places: Tensor, out: Tensor, count: Tensor) -> None:
    """``out[:, k] = x[:, places[k]]`` in the first ``count`` rows. x: [R, N], out: [R, K], contiguous."""
    _choosing(x.dtype)(x, places, out, count, x.shape[1], len(places))


def copy_rows(x: Tensor, out: Tensor, count: Tensor) -> None:
    """``out = x`` in the first ``count`` rows. x, out: [R, ..], contiguous."""
    _copying()(x, out, count, x[0].numel() * x.element_size())


def rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, eps: float, count: Tensor) -> None:
    """The norm of ``x``, or of ``x += added``. x, added, out: [R, D], contiguous."""
    _norm(x.dtype, weight.dtype, eps, added is not None)(
        x, 0 if added is None else added, weight, out, count, x.shape[-1]
    )


@Compiled
def _taking() -> Kernel:
    k = Kernel("take_rows")
    table, places, out, size = k.pointer(0), k.pointer(1), k.pointer(2), k.number(4)
    with k.share(k.counted(3)) as row:
        k.copy(k.bytes_at(table, k.load(places, I64, row) * size), k.bytes_at(out, row * size), size)
    return k


@Compiled
def _choosing(dtype: torch.dtype) -> Kernel:
    k, of = Kernel("take_columns"), OF_TORCH[dtype]
    x, places, out, count, width, taken = *map(k.pointer, range(3)), k.counted(3), k.number(4), k.number(5)
    with k.share(taken) as column:
        place = k.load(places, I64, column)
        with k.loop(0, count) as row:
            k.store(k.load(x, of, row * width + place), out, row * taken + column)
    return k


@Compiled
def _copying() -> Kernel:
    k = Kernel("copy_rows")
    x, out, size = k.pointer(0), k.pointer(1), k.number(3)
    with k.share(k.counted(2)) as row:
        k.copy(k.bytes_at(x, row * size), k.bytes_at(out, row * size), size)
    return k


@Compiled
def _norm(dtype: torch.dtype, weighted: torch.dtype, eps: float, adds: bool) -> Kernel:
    k, of = Kernel("rms_norm"), OF_TORCH[dtype]
    x, added, weight, out = (k.pointer(index) for index in range(4))
    width = k.number(5)
    with k.share(k.counted(4)) as row:
        row_of_x = k.at(x, row * width, of)
        if adds:
            row_added = k.at(added, row * width, of)

            def add(index: Value, lanes: int, x: Value = row_of_x, y: Value = row_added) -> None:
                k.write(k.read(x, of, index, lanes) + k.read(y, of, index, lanes), x, of, index)

            k.across(width, add)
        _normed(k, row_of_x, weight, k.at(out, row * width, of), (width, eps), (of, OF_TORCH[weighted]))
    return k


def _normed(
    k: Kernel, source: Value, weight: Value, out: Value, shape: tuple[Value | int, float], types: tuple[object, object]
) -> None:
    """One row. types: of numbers and of weights."""
    weighted_row(k, source, weight, out, inverse_rms(k, source, types[0], shape), shape[0], types)


def inverse_rms(k: Kernel, source: Value, of: object, shape: tuple[Value | int, float]) -> Value:
    """A row's statistics, in fp32."""
    width, eps = shape
    squares, rest = k.variable(k.constant(0.0, vector(F32))), k.variable(k.constant(0.0, F32))

    def add(index: Value, lanes: int) -> None:
        value, total = k.read(source, of, index, lanes), squares if lanes == LANES else rest
        total.value = k.fma(value, value, total.value)

    k.across(width, add)
    mean = (k.total(squares.value) + rest.value) / k.as_float(width)
    return k.constant(1.0, F32) / k.sqrt(mean + eps)


def weighted_row(
    k: Kernel,
    source: Value,
    weight: Value,
    out: Value,
    scale: Value,
    width: Value | int,
    types: tuple[object, object],
) -> None:
    """``source * scale``, each number rounded before it is multiplied by its weight, unless that is wider."""
    of, weighted = types

    def write(index: Value, lanes: int) -> None:
        value = k.read(source, of, index, lanes) * scale
        value = k.rounded(value, of) if weighted == of else value
        k.write(value * k.read(weight, weighted, index, lanes), out, of, index)

    k.across(width, write)
