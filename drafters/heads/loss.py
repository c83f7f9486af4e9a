"""The loss of a head: soft cross-entropy against the target's distribution, fused with the output matrix.

Logits over a vocabulary are by far the largest tensors in training a head, and one pass over them for each operation
costs more than the products that computed them. So rows are processed in chunks that stay in a CPU's cache, and
gradients are computed in the forward pass, as in Hsu et al., "Liger Kernel" (2024).

Legend: N rows, H width, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Rows in a chunk, by device: with 4,096 tokens their logits are 4 MB on a CPU; a GPU needs large chunks, not a cache.
_PIECES = {"cpu": 256, "cuda": 8192}


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, chances: Tensor, counts: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """The mean cross-entropy in nats of ``softmax(hidden @ weight.T)`` against ``chances``.

    hidden: [N, H]. weight: [V', H]. chances: fp32[N, V']. counts: bool[N], which rows count; None for all. A
    loss over no rows is 0. Products are computed in autocast's dtype where it is on. cap: logits l become
    ``cap * tanh(l / cap)`` first.
    """
    loss: Tensor = _Fused.apply(hidden, weight, chances, counts, cap)  # type: ignore[no-untyped-call]
    return loss


class _Fused(torch.autograd.Function):
    """hidden: [N, H], chances: [N, V'], counts: bool[N] or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chances: Tensor, counts: Tensor | None, cap: float | None
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast, rows = weight.to(dtype), hidden.to(dtype)
        share = 1.0 / max(1, len(hidden) if counts is None else int(counts.sum()))
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, size = torch.zeros((), device=hidden.device), _PIECES[device]
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            logits = (rows[piece] @ cast.T).float()
            if cap is not None:
                bent = logits.div_(cap).tanh_()
                logits = bent * cap
            logs = logits.log_softmax(dim=-1)
            losses = -(chances[piece] * logs).sum(dim=-1)
            slope = logs.exp_().sub_(chances[piece]).mul_(share)
            if counts is not None:
                losses = losses * counts[piece]
                slope *= counts[piece, None]
            if cap is not None:
                slope *= 1 - bent.square()
            total += losses.sum() * share
            half = slope.to(dtype)
            by_hidden[piece] = half @ cast
            by_weight += half.T @ rows[piece]
        ctx.save_for_backward(by_hidden, by_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * upstream, by_weight * upstream, None, None, None
