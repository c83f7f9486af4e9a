"""What some families do to their logits before anything reads them: a factor, and a cap."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, on_triton


@op()
def finish_logits(logits: Tensor, scale: float = 1.0, cap: float | None = None, count: Tensor | None = None) -> Tensor:
    """``x = logits * scale``, then ``cap * tanh(x / cap)`` if there is a cap; in place. Returns the logits.

    logits: fp32[W, V], contiguous; each number's result depends on that number alone. With neither a factor nor
    a cap nothing runs. count: int64[1], of how many rows, read when it runs (of compiled kernels; None: all).
    """
    if scale == 1.0 and cap is None:
        return logits
    logits.mul_(scale)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


@finish_logits.kernel
def _finish_logits(logits: Tensor, scale: float = 1.0, cap: float | None = None, count: Tensor | None = None) -> Tensor:
    if scale == 1.0 and cap is None:
        return logits
    (rows, width), columns = logits.shape, 1024 if on_triton(logits) else 4096
    constants = {"WIDTH": width, "CAP": cap or 0.0, "COLUMNS": columns}
    grid = rows, -(-width // columns)
    launch("rows.finish_rows", grid, (logits, scale), constants, count, rows=True, enable_fp_fusion=False)
    return logits
