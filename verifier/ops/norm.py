"""Root-mean-square norm, alone or behind a residual addition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.level import known_tokens
from foresay.verifier.ops.linear import Partials
from foresay.verifier.ops.take import copy_rows, take_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, count: Tensor | None = None) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, statistics in fp32 (Llama's order: cast, then weight).

    x: [..., D], weight: [D] of the same dtype; one of fp32 where x is narrower is multiplied before the result is cast
    (Gemma's order). Each row's result depends on that row alone. count: int64[1], of how
    many rows, read when it runs (of compiled kernels; None: all).
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import norm

        return norm.rms_norm(x, weight, eps)
    if compiled(x):
        return _compiled(x.contiguous(), None, weight, eps, count)
    if x.dtype.itemsize == 4:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype is torch.float32:
        return wide.mul_(scale).mul_(weight).to(x.dtype)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, y: Tensor | Partials, weight: Tensor, eps: float, count: Tensor | None = None) -> Tensor:
    """``x += y``, then the norm of the sum as :func:`rms_norm` has it.

    x, y: [R, D], contiguous; x is the residual stream and is changed in place. y may be a product that is not finished.
    Returns [R, D].
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import norm

        return norm.add_rms_norm(x, y, weight, eps)
    if isinstance(y, Partials):
        y = y.finished(x.dtype)
    if compiled(x):
        return _compiled(x, y, weight, eps, count)
    return rms_norm(x.add_(y), weight, eps)


def _compiled(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, count: Tensor | None) -> Tensor:
    from foresay.verifier.ops.kernels.cpu import rows
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    out = room(x.shape, x.dtype)
    rows.rms_norm(x, added, weight, out, eps, counted(count, x.shape[:-1].numel()))
    return out


def embed(
    table: Tensor, tokens: Tensor, weight: Tensor, eps: float, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of the tokens, the residual stream's beginning, and their norm: [R, D] each.

    table: [V, D]. tokens: int64[R]. weight: [D]. count: see :func:`~foresay.verifier.ops.take.take_rows`.
    """
    if table.is_cuda:
        from foresay.verifier.ops.kernels import take as kernels

        return kernels.embed(table, tokens, weight, eps)
    x = take_rows(table, tokens, count)
    return x, rms_norm(x, weight, eps, count)


def pair(
    table: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """The norms of the tokens' rows and of ``hidden`` side by side, [R, 2 D]; and ``hidden``, or its norm, anew.

    table: [V, D]; a token that it does not have is its last one, what is none its first. tokens: int64[R]. hidden:
    [R, D]. weights: [D] each.
    """
    if table.is_cuda:
        from foresay.verifier.ops.kernels import take as kernels

        return kernels.pair(table, tokens, hidden, weights, eps, keep_normed)
    normed = rms_norm(hidden, weights[1], eps)
    embedded = rms_norm(take_rows(table, known_tokens(tokens, len(table))), weights[0], eps)
    return torch.cat((embedded, normed), dim=-1), normed if keep_normed else copy_rows(hidden)


@dataclass(frozen=True, slots=True)
class Norm:
    """How vectors are normed, with the weights."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


def norm(x: Tensor, how: Norm, count: Tensor | None = None) -> Tensor:
    return rms_norm(x, how.weight, how.eps, count)


def add_norm(
    x: Tensor, y: Tensor | Partials, how: Norm | None, count: Tensor | None = None, share: float = 1.0
) -> Tensor:
    assert how is not None and share == 1.0
    return add_rms_norm(x, y, how.weight, how.eps, count)


def embed_norm(table: Tensor, tokens: Tensor, how: Norm | None, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    assert how is not None
    return embed(table, tokens, how.weight, how.eps, count)
