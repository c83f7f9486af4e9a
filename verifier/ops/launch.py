"""Launching a kernel for GPU and CPU: compiled by Triton for the one, and by
:mod:`~foresay.verifier.ops.kernels.cpu.language` for the other. Imports no triton before a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from foresay.verifier.ops.eager import INTERPRETED
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.language import Language
from foresay.verifier.ops.kernels.cpu.launch import Compiled, arena, counted
from foresay.verifier.ops.kernels.cpu.values import OF_TORCH
from foresay.verifier.ops.records import Norm, SplitKSums


def on_triton(x: Tensor) -> bool:
    """Whether Triton runs kernels on this tensor."""
    return INTERPRETED or x.device.type != "cpu"


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor for a kernel's output, on the device of another one, and of its dtype unless given."""
    dtype = dtype or like.dtype
    return like.new_empty(tuple(shape), dtype=dtype) if on_triton(like) else arena(shape, dtype)


def launch(
    kernel: str,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | float, ...],
    constants: dict[str, Any],
    count: Tensor | None = None,
    rows: bool = False,
    **of_gpu: Any,
) -> None:
    """Run it for each point of a grid.

    kernel: its file and its name. count: int64[1], how many of the grid's first axis are run, read when it runs (on a
    CPU;
    None: all). rows: whether its blocks are contiguous in memory. of_gpu: Triton's options.
    """
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    assert all(one.is_contiguous() for one in tensors), "a kernel reads numbers one behind the other"
    if 0 in grid:
        return
    if on_triton(tensors[0]):
        pdl = import_module("foresay.verifier.ops.kernels.pdl")
        _body(kernel)[grid](*arguments, **constants, **of_gpu, **pdl.pdl_args())
        return
    kinds = tuple(one.dtype if isinstance(one, Tensor) else int if isinstance(one, int) else one for one in arguments)
    made = _written(kernel, grid[1:], kinds, tuple(constants.items()), rows)
    made(counted(count, grid[0]), *(one for one in arguments if not isinstance(one, float)))


@cache
def _body(kernel: str) -> Any:
    file, name = kernel.split(".")
    return getattr(import_module(f"foresay.verifier.ops.kernels.{file}"), name)


@Compiled
def _written(
    kernel: str, within: tuple[int, ...], kinds: tuple[Any, ...], constants: tuple[tuple[str, Any], ...], rows: bool
) -> Kernel:
    """within: the grid's further axes. kinds: of the arguments: the dtype of a tensor, int, or a float itself."""
    body = _body(kernel)
    k = Kernel(kernel.partition(".")[2])
    with k.share(k.counted(0) * prod(within)) as unit:
        parts = [prod(within[at:]) for at in range(len(within) + 1)]
        programs = [unit // part if not at else unit // part % within[at - 1] for at, part in enumerate(parts)]
        tl, index = Language(k, programs, rows), 0
        given: list[Any] = []
        for name, kind in zip(body.arg_names, kinds, strict=False):
            index += not isinstance(kind, float)
            if isinstance(kind, torch.dtype):
                given.append(tl.pointer(name, k.pointer(index), OF_TORCH[kind]))
            else:
                given.append(tl.number(k.number(index)) if kind is int else kind)
        tl.run(body, *given, **dict(constants), USE_GDC=False)
    return k


# -- common arguments of kernels ---------------------------------------------------------------------------------------


def as_read(product: Tensor | SplitKSums) -> tuple[tuple[Tensor, Tensor], int, dict[str, Any]]:
    """A product as arguments of kernels that use ``product_at``: pointers, how far apart segments are, constants. Of
    one weight only the second depends on the number of rows, so that a row's reader is one compilation for all."""
    if isinstance(product, Tensor):
        return (product, product), 0, {"SEGMENTS": 1, "BIAS": False}
    sums, bias, count = product.sums, product.bias, len(product.sums)
    constants = {"SEGMENTS": product.segments or count, "BIAS": bias is not None}
    return (sums, sums if bias is None else bias), sums.stride(0) if count > 1 else 0, constants


def as_normed(how: Norm | None, otherwise: Tensor) -> tuple[tuple[Tensor, Tensor], float, dict[str, Any]]:
    """A norm as arguments of kernels that call ``normed`` if NORM: pointers, which are ``otherwise`` if nothing is
    read; eps, constants."""
    if how is None:
        return (otherwise, otherwise), 0.0, {"NORM": False, "SHIFTED": False, "CENTRED": False}
    constants = {"NORM": True, "SHIFTED": how.bias is not None, "CENTRED": how.centred}
    return (how.weight, how.weight if how.bias is None else how.bias), how.eps, constants


def as_stored(keys: Tensor, values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and scales as kernel arguments; without scales, a tensor that is not read."""
    if scales is None:
        return keys, values, keys
    if keys.dtype is torch.int8 or not on_triton(keys):
        return keys, values, scales
    return keys.view(torch.uint8), values.view(torch.uint8), scales


def padded(count: int) -> int:
    """The next power of two: Triton's blocks have no other sizes."""
    return 1 << (count - 1).bit_length()


def row_of(x: Tensor, width: int) -> dict[str, int]:
    """The constants of a program that has a whole row of ``x``."""
    if not on_triton(x):
        return {"WIDTH": width, "BLOCK": width}
    # Triton compiles different code for different alignments, which may sum in another order.
    assert x.data_ptr() % 16 == 0, "rows begin on 16 bytes, as every new tensor does"
    return {"WIDTH": width, "BLOCK": padded(width)}


def of_any_width(x: Tensor, width: int) -> dict[str, int]:
    """The same if the width is not a constant: a CPU's loop goes as far as there are numbers."""
    return {"BLOCK": padded(width) if on_triton(x) else 1 << 30}


def warps(width: int) -> int:
    """Depends only on the width: the order of a row's sum must not depend on the number of rows."""
    return 8 if width > 1024 else 4 if width > 256 else 1
