"""Levels whose logits are there at once, the same below every node of a depth."""

from __future__ import annotations

from torch import Tensor

from foresay.drafters.growth import Growth


def of_level(growth: Growth, logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the next level, as :meth:`foresay.drafters.growth.Passes.next` hands them out, and those of all.

    logits: fp32[levels * S, V'], level by level.
    """
    assert logits is not None, "the logits of all levels"
    depth, size = len(growth.levels), growth.state.size
    own = logits[depth * size : (depth + 1) * size]
    if growth.plan.apart:
        own = own.repeat_interleave(growth.plan.levels[depth].front, dim=0)
    return own, logits
