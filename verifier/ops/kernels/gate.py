"""The gate of what attention puts out, in one launch: a program for each row and piece of its width."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.segments import ROWS, as_read, product_at
from foresay.verifier.ops.records import Partials

_COLUMNS = 1024


@triton.jit(do_not_specialize=ROWS)
def gate_rows(x, gate, bias, R, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
              COLUMNS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, WIDTH / COLUMNS). gate: a product with its bias."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, where = columns < WIDTH, x + row.to(tl.int64) * WIDTH + columns
    kind: tl.constexpr = x.dtype.element_ty
    wide = product_at(gate, bias, row, columns, inside, R, kind, WIDTH, SEGMENTS, BIAS).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-wide))).to(kind)
    tl.store(where, (tl.load(where, inside, 0.0).to(tl.float32) * opened.to(tl.float32)).to(kind), inside)


def gate_heads(x: Tensor, gate: Tensor | Partials) -> None:
    """As :func:`foresay.verifier.ops.gate.gate_heads`."""
    (product, bias), about = as_read(gate)
    assert x.is_contiguous() and product.is_contiguous(), "rows lie one behind the other"
    assert x.shape == product.shape[-2:], "each number has a gate"
    rows, width = x.shape
    if rows:
        gate_rows[(rows, triton.cdiv(width, _COLUMNS))](
            x, product, bias, rows, WIDTH=width, **about, COLUMNS=_COLUMNS, enable_fp_fusion=False, **chained()
        )
