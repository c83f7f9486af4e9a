"""Triton's language on a processor: what its words do, and what is refused while a kernel is written.

That whole kernels of ours do the same there as on a GPU is in ``test_cpu_trees``, ``test_row_ops`` and ``on_device``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.language import Language
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import OF_TORCH

pytestmark = pytest.mark.usefixtures("any_processor")


def run(body: Any, *tensors: Tensor, programs: int = 1, vectors: bool = True, **constants: Any) -> None:
    def write() -> Kernel:
        k = Kernel(body.fn.__name__)
        with k.share(programs) as program:
            language = Language(k, [program], vectors)
            kinds = [OF_TORCH[each.dtype] for each in tensors]
            given = [language.pointer(f"{at}", k.pointer(at), kind) for at, kind in enumerate(kinds)]
            language.run(body, *given, **constants)
        return k

    Compiled(write)()(*tensors)


@triton.jit
def _halves(x, out, total, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    read = tl.load(x + rows * WIDTH + columns, (rows < tl.load(total)) & (columns <= 7 * tl.load(total)), 0.0)
    tl.store(out + tl.arange(0, ROWS), tl.sum(read * read, axis=1))


@pytest.mark.parametrize("width", [1, 15, 16, 40, 300])
@pytest.mark.parametrize("rows", [1, 5])
def test_sums_along_the_last_axis_within_a_mask(rows: int, width: int) -> None:
    x, out = torch.arange(rows * width, dtype=torch.float32).view(rows, width) % 7, torch.full((rows,), -1.0)
    run(_halves, x, out, torch.tensor([3]), ROWS=rows, WIDTH=width)
    wanted = x[:, :22].square().sum(1)
    wanted[3:] = 0.0
    assert torch.equal(out, wanted)


@triton.jit
def _turned(x, BARRIER: tl.constexpr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    read = tl.load(x + lane)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + SIZE - 1 - lane, read)


def test_after_a_barrier_all_has_been_read_before_any_is_written() -> None:
    x = torch.arange(40)
    run(_turned, x, vectors=False, BARRIER=True, SIZE=40)
    assert x.tolist() == list(range(40))[::-1]


@triton.jit
def _piece(x, count, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < tl.load(count)
    value = tl.load(x + index, inside, 0.0)
    tl.store(x + index, tl.where(value > 2.0, -value, value) + 1.0, inside)


@pytest.mark.parametrize("count", [0, 5, 33, 64])
def test_a_mask_ends_a_loop(count: int) -> None:
    x = torch.arange(64, dtype=torch.float32)
    wanted = torch.cat((torch.where(x > 2, -x, x)[:count] + 1, x[count:]))
    run(_piece, x, torch.tensor([count]), programs=4, SIZE=16)
    assert torch.equal(x, wanted)


@triton.jit
def _branch(x, SIZE: tl.constexpr):
    if tl.load(x) > 0:
        tl.store(x, 1)


@triton.jit
def _stale(x, SIZE: tl.constexpr):
    read = tl.load(x + tl.arange(0, SIZE))
    tl.store(x + tl.arange(0, SIZE), tl.zeros([SIZE], tl.int64))
    tl.store(x + tl.arange(0, SIZE), read)


@triton.jit
def _half(x, SIZE: tl.constexpr):
    read = tl.load(x + tl.arange(0, SIZE))
    tl.store(x + tl.arange(0, SIZE), read + read)


@pytest.mark.parametrize(
    ("body", "dtype", "message"),
    [
        (_branch, torch.int64, "no branch may depend on a number"),
        (_stale, torch.int64, "0 is read after it was stored to"),
        (_half, torch.bfloat16, "half types are only converted"),
    ],
)
def test_what_is_refused(body: Callable[..., Any], dtype: torch.dtype, message: str) -> None:
    with pytest.raises((TypeError, AssertionError), match=message):
        run(body, torch.zeros(8, dtype=dtype), SIZE=8)
