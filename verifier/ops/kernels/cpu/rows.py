"""What is done to each row for itself: taking rows of a table, norms, finishing logits."""

from __future__ import annotations

from collections.abc import Callable

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


#: Logits that a thread finishes at a time.
_COLUMNS = 4096


def finish_logits(logits: Tensor, scale: float, cap: float | None, count: Tensor) -> None:
    """Scale and cap the first ``count`` rows. logits: fp32[W, V], contiguous."""
    _finishing(scale, cap)(logits, count, logits.shape[1])


def norm(
    x: Tensor,
    added: Tensor | None,
    weights: tuple[Tensor, Tensor | None],
    out: Tensor,
    how: tuple[float, bool, float],
    count: Tensor,
) -> None:
    """The norm of ``x``, or of ``x += share * added``. x, added, out: [R, D], contiguous. weights: weight and bias.
    how: eps, whether the mean is subtracted first, share."""
    (weight, bias), (eps, centred, share) = weights, how
    made = _norm(x.dtype, weight.dtype, (eps, centred, bias is not None), None if added is None else share)
    made(x, 0 if added is None else added, weight, out, count, x.shape[-1], 0 if bias is None else bias)


def add(x: Tensor, added: Tensor, share: float, count: Tensor) -> None:
    """``x += share * added`` in the first ``count`` rows. x, added: [R, D], contiguous."""
    _adding(x.dtype, share)(x, added, count, x.shape[-1])


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
def _finishing(scale: float, cap: float | None) -> Kernel:
    k = Kernel("finish_logits")
    width = k.number(2)
    pieces = (width + (_COLUMNS - 1)) // _COLUMNS
    with k.share(k.counted(1) * pieces) as unit:
        begin = unit % pieces * _COLUMNS
        piece = k.at(k.pointer(0), unit // pieces * width + begin, F32)

        def finish(index: Value, lanes: int) -> None:
            value = k.read(piece, F32, index, lanes) * scale
            k.write(value if cap is None else k.softcapped(value, cap), piece, F32, index)

        k.across(k.smallest(width - begin, _COLUMNS), finish)
    return k


@Compiled
def _norm(dtype: torch.dtype, weighted: torch.dtype, how: tuple[float, bool, bool], share: float | None) -> Kernel:
    """how: eps, whether rows are centred, whether there is a bias. share: None if nothing is added before."""
    k, of, (eps, centred, biased) = Kernel("norm"), OF_TORCH[dtype], how
    x, added, weight, out = (k.pointer(index) for index in range(4))
    width, bias = k.number(5), k.pointer(6) if biased else None
    with k.share(k.counted(4)) as row:
        row_of_x = k.at(x, row * width, of)
        if share is not None:
            _added(k, row_of_x, k.at(added, row * width, of), (width, of), share)
        into, types = k.at(out, row * width, of), (of, OF_TORCH[weighted])
        _normed(k, row_of_x, weight, into, (width, eps), types, bias, centred)
    return k


@Compiled
def _adding(dtype: torch.dtype, share: float) -> Kernel:
    k, of = Kernel("add"), OF_TORCH[dtype]
    x, added, width = k.pointer(0), k.pointer(1), k.number(3)
    with k.share(k.counted(2)) as row:
        _added(k, k.at(x, row * width, of), k.at(added, row * width, of), (width, of), share)
    return k


def _added(k: Kernel, x: Value, y: Value, shape: tuple[Value, object], share: float) -> None:
    """One row: ``x += share * y``, the product rounded first."""
    width, of = shape

    def add(index: Value, lanes: int) -> None:
        mine, its = k.read(x, of, index, lanes), k.read(y, of, index, lanes)
        k.write(mine + (its if share == 1.0 else k.rounded(its * share, of)), x, of, index)

    k.across(width, add)


def _normed(
    k: Kernel,
    source: Value,
    weight: Value,
    out: Value,
    shape: tuple[Value, float],
    types: tuple[object, object],
    bias: Value | None,
    centred: bool,
) -> None:
    """One row. types: of numbers, and of weight and bias."""
    (width, _), of = shape, types[0]
    mean = (
        _sum(k, width, lambda index, lanes: k.read(source, of, index, lanes)) / k.as_float(width) if centred else None
    )
    weighted_row(k, source, weight, out, inverse_rms(k, source, of, shape, mean), width, types, bias, mean)


def inverse_rms(
    k: Kernel, source: Value, of: object, shape: tuple[Value | int, float], mean: Value | None = None
) -> Value:
    """What a row is multiplied by to be normed, in fp32. shape: its width, and epsilon. mean: subtracted first."""
    (width, eps), read = shape, _centred(k, source, of, mean)
    return k.constant(1.0, F32) / k.sqrt(_sum(k, width, read, squared=True) / k.as_float(width) + eps)


def weighted_row(
    k: Kernel,
    source: Value,
    weight: Value,
    out: Value,
    scale: Value,
    width: Value | int,
    types: tuple[object, object],
    bias: Value | None = None,
    mean: Value | None = None,
) -> None:
    """``source * scale``, each number rounded before it is multiplied by its weight, unless that is wider."""
    (of, weighted), read = types, _centred(k, source, types[0], mean)

    def write(index: Value, lanes: int) -> None:
        value = read(index, lanes) * scale
        value = k.rounded(value, of) if weighted == of else value
        value = value * k.read(weight, weighted, index, lanes)
        k.write(value if bias is None else value + k.read(bias, weighted, index, lanes), out, of, index)

    k.across(width, write)


def _centred(k: Kernel, source: Value, of: object, mean: Value | None) -> Callable[[Value, int], Value]:
    """Reads numbers of a row."""

    def read(index: Value, lanes: int) -> Value:
        value = k.read(source, of, index, lanes)
        return value if mean is None else value - mean

    return read


def _sum(k: Kernel, width: Value | int, read: Callable[[Value, int], Value], squared: bool = False) -> Value:
    """The sum of a row in fp32, or of its squares: lane by lane, then the lanes, then what fills no vector."""
    whole, rest = k.variable(k.constant(0.0, vector(F32))), k.variable(k.constant(0.0, F32))

    def add(index: Value, lanes: int) -> None:
        value, total = read(index, lanes), whole if lanes == LANES else rest
        total.value = k.fma(value, value, total.value) if squared else total.value + value

    k.across(width, add)
    return k.total(whole.value) + rest.value
