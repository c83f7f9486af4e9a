"""What some families do to their logits before anything reads them: a factor, and a cap."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import compiled


def finish_logits(logits: Tensor, scale: float = 1.0, cap: float | None = None, count: Tensor | None = None) -> Tensor:
    """``x = logits * scale``, then ``cap * tanh(x / cap)`` if there is a cap; in place. Returns the logits.

    logits: fp32[W, V], contiguous; each number's result depends on that number alone. With neither a factor nor
    a cap nothing runs. count: int64[1], of how many rows, read when it runs (of compiled kernels; None: all).
    """
    if scale == 1.0 and cap is None:
        return logits
    if logits.is_cuda:
        from foresay.verifier.ops.kernels import logits as kernels

        kernels.finish_logits(logits, scale, cap)
    elif compiled(logits):
        from foresay.verifier.ops.kernels.cpu import rows
        from foresay.verifier.ops.kernels.cpu.launch import counted

        rows.finish_logits(logits, scale, cap, counted(count, len(logits)))
    else:
        logits.mul_(scale)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
    return logits
