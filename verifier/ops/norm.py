"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, statistics in fp32 (Llama's order: cast, then weight).

    x: [..., D], weight: [D] of the same dtype. Each row's result depends on that row alone.
    """
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)
