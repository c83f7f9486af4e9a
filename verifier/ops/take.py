"""Rows of a table, as many as there are places; numbers of rows in another order."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import compiled


def take_rows(table: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    """``table[places]``. table: [N, ..], contiguous. places: int64[R]. Returns [R, ..].

    count: int64[1], how many rows are taken, read when it runs (of compiled kernels; None: all).
    """
    if not compiled(table):
        return table.index_select(0, places)
    from foresay.verifier.ops.kernels.cpu import rows
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    out = room((len(places), *table.shape[1:]), table.dtype)
    rows.take_rows(table, places, out, counted(count, len(places)))
    return out


def take_both(first: Tensor, second: Tensor, places: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same rows of two tables of one shape. first, second: [N, D]."""
    if first.is_cuda:
        from foresay.verifier.ops.kernels import take as kernels

        return kernels.take_both(first, second, places)
    return take_rows(first, places, count), take_rows(second, places, count)


def copy_rows(x: Tensor, count: Tensor | None = None) -> Tensor:
    """The same rows elsewhere, as they are now. x: [R, ..], contiguous; count: see :func:`take_rows`."""
    if not compiled(x):
        return x.clone()
    from foresay.verifier.ops.kernels.cpu import rows
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    out = room(x.shape, x.dtype)
    rows.copy_rows(x, out, counted(count, len(x)))
    return out


def take_columns(x: Tensor, places: Tensor, count: Tensor | None = None) -> Tensor:
    """``x[:, places]``. x: [R, N], contiguous. places: int64[K]. Returns [R, K]; count: see :func:`take_rows`."""
    if not compiled(x):
        return x.index_select(1, places)
    from foresay.verifier.ops.kernels.cpu import rows
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    out = room((len(x), len(places)), x.dtype)
    rows.take_columns(x, places, out, counted(count, len(x)))
    return out
