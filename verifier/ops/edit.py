"""What requests change of their logits, on the device of the logits (:mod:`foresay.spec.adjust`)."""

from __future__ import annotations

from torch import Tensor

from foresay.spec import adjust
from foresay.verifier.ops.eager import compiled


def edit_logits(logits: Tensor, edits: adjust.LogitEdits) -> None:
    """What :func:`foresay.spec.adjust.edit_logits` does."""
    adjust.edit_logits(logits, edits, keep_allowed)


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """What :func:`foresay.spec.adjust.keep_allowed` does.

    logits: fp32[N, V], contiguous; allowed: int32[N, ceil(V / 32)], or one row for all.
    """
    if not compiled(logits):
        adjust.keep_allowed(logits, allowed)
        return
    from foresay.verifier.ops.kernels.cpu import allowed as kernels

    kernels.keep_allowed(logits, allowed.contiguous())  # a grammar's masks may be one row that is repeated
