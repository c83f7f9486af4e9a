"""silu(gate) * up in one launch: every element by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_mul_rows(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up; one program a piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    start = gate_up + row * (2 * INNER) + columns
    gate = tl.load(start, inside, 0.0)
    up = tl.load(start + INNER, inside, 0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * INNER + columns, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As :func:`verifier.ops.activation.silu_mul`."""
    assert gate_up.is_contiguous(), "rows lie one behind the other"
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if rows:
        silu_mul_rows[(rows, triton.cdiv(inner, _BLOCK))](gate_up, out, inner, _BLOCK)
    return out
