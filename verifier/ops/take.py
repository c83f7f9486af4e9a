"""Rows of a table, as many as there are places; numbers of rows in another order."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, new, of_any_width, row_of


@op()
def take_rows(table: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    """``table[places]``. table: [N, ..], contiguous. places: int64[R]. Returns [R, ..].

    count: int64[1], how many rows are taken, read when it runs (of kernels of a CPU; None: all).
    """
    return table.index_select(0, places)


@take_rows.kernel
def _take_rows(table: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    return _taken(table, places, len(places), count, placed=True)


@op()
def copy_rows(x: Tensor, count: Tensor | None = None) -> Tensor:
    """The same rows elsewhere, as they are now. x: [R, ..], contiguous; count: see :func:`take_rows`."""
    return x.clone()


@copy_rows.kernel
def _copy_rows(x: Tensor, count: Tensor | None = None) -> Tensor:
    return _taken(x, x, len(x), count, placed=False)


def _taken(table: Tensor, places: Tensor, rows: int, count: Tensor | None, placed: bool) -> Tensor:
    out, width = new((rows, *table.shape[1:]), table), table.shape[1:].numel()
    constants = {"PLACED": placed} | of_any_width(table, width)
    launch("rows.taken_rows", (rows,), (table, places, out, width), constants, count, rows=True)
    return out


@op()
def take_both(first: Tensor, second: Tensor, places: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same rows of two tables of one shape. first, second: [N, D]."""
    return take_rows(first, places, count), take_rows(second, places, count)


@take_both.kernel
def _take_both(first: Tensor, second: Tensor, places: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = len(places), first.shape[1]
    made = new(shape, first), new(shape, second)
    arguments = (first, second, places, *made)
    launch("rows.both_rows", shape[:1], arguments, row_of(first, shape[1]), count, rows=True, num_warps=1)
    return made


@op()
def take_columns(x: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    """``x[:, places]``. x: [R, N], contiguous. places: int64[K]. Returns [R, K]; count: see :func:`take_rows`."""
    return x.index_select(1, places)


@take_columns.kernel
def _take_columns(x: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    (rows, width), taken = x.shape, len(places)
    out = new((rows, taken), x)
    launch("rows.taken_columns", (rows,), (x, places, out, width, taken), of_any_width(x, taken), count)
    return out
