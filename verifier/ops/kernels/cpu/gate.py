"""The gate of what attention puts out, number by number."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.types import OF_TORCH
from foresay.verifier.ops.kernels.cpu.values import Value

#: Numbers of a row that a thread takes at once: a single row is shared among threads too.
_PIECE = 256


def gate_heads(x: Tensor, gate: Tensor, count: Tensor) -> None:
    """``x *= sigmoid(gate)`` in the first ``count`` rows. x, gate: [R, N], contiguous."""
    _gating(x.dtype)(x, gate, count, x.shape[1])


@Compiled
def _gating(dtype: torch.dtype) -> Kernel:
    k, of = Kernel("gate_heads"), OF_TORCH[dtype]
    x, gate, rows, width = k.pointer(0), k.pointer(1), k.counted(2), k.number(3)
    pieces = (width + (_PIECE - 1)) // _PIECE
    with k.share(rows * pieces) as unit:
        first = unit % pieces * _PIECE
        start = unit // pieces * width + first

        def write(index: Value, lanes: int) -> None:
            at = start + index
            below = k.exp(k.read(gate, of, at, lanes) * -1.0) + 1.0
            k.write(k.read(x, of, at, lanes) * k.rounded(k.constant(1.0, below.type) / below, of), x, of, at)

        k.across(k.smallest(width - first, _PIECE), write)
    return k
