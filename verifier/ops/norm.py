"""Root-mean-square norm, alone or behind a residual addition."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from verifier.ops.eager import compiled
from verifier.ops.linear import Partials


def rms_norm(x: Tensor, weight: Tensor, eps: float, count: Tensor | None = None) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, statistics in fp32 (Llama's order: cast, then weight).

    x: [..., D], weight: [D] of the same dtype. Each row's result depends on that row alone. count: int64[1], of how
    many rows, read when it runs (of compiled kernels; None: all).
    """
    if x.is_cuda:
        from verifier.ops.kernels import norm

        return norm.rms_norm(x, weight, eps)
    if compiled(x):
        return _compiled(x.contiguous(), None, weight, eps, count)
    if x.dtype.itemsize == 4:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, y: Tensor | Partials, weight: Tensor, eps: float, count: Tensor | None = None) -> Tensor:
    """``x += y``, then the norm of the sum as :func:`rms_norm` has it.

    x, y: [R, D], contiguous; x is the residual stream and is changed in place. y may be a product that is not finished.
    Returns [R, D].
    """
    if x.is_cuda:
        from verifier.ops.kernels import norm

        return norm.add_rms_norm(x, y, weight, eps)
    if isinstance(y, Partials):
        y = y.finished(x.dtype)
    if compiled(x):
        return _compiled(x, y, weight, eps, count)
    return rms_norm(x.add_(y), weight, eps)


def _compiled(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, count: Tensor | None) -> Tensor:
    from verifier.ops.kernels.cpu import rows
    from verifier.ops.kernels.cpu.launch import counted, room

    out = room(x.shape, x.dtype)
    rows.rms_norm(x, added, weight, out, eps, counted(count, x.shape[:-1].numel()))
    return out
