"""Scaling and capping logits in one launch: a program for each row and piece of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.key_blocks import LOG2_E, softcapped

_COLUMNS = 1024


@triton.jit
def finish_rows(logits, factor, WIDTH: tl.constexpr, CAP: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (W, WIDTH / COLUMNS). factor: of the logits, or of what :func:`softcapped` takes. CAP: 0 for none."""
    wait_turn(CHAINED)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    where = logits + tl.program_id(0).to(tl.int64) * WIDTH + columns
    value = tl.load(where, mask=columns < WIDTH) * factor
    if CAP > 0.0:
        value = softcapped(value, CAP)
    tl.store(where, value, mask=columns < WIDTH)


def finish_logits(logits: Tensor, scale: float, cap: float | None) -> None:
    """As :func:`foresay.verifier.ops.logits.finish_logits`."""
    assert logits.is_contiguous(), "logits must be contiguous"
    rows, width = logits.shape
    factor = scale if cap is None else 2.0 * LOG2_E * scale / cap
    if rows:
        finish_rows[(rows, triton.cdiv(width, _COLUMNS))](
            logits, factor, WIDTH=width, CAP=cap or 0.0, COLUMNS=_COLUMNS, enable_fp_fusion=False, **chained()
        )
