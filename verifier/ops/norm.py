"""The norm of each row of what layers hand on, alone or after an addition to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.level import known_tokens
from foresay.verifier.ops.records import Norm, Partials
from foresay.verifier.ops.take import copy_rows, take_rows


def norm(x: Tensor, how: Norm, count: Tensor | None = None) -> Tensor:
    """``x / rms(x) * weight + bias`` over the last dimension, or the same of ``x - mean(x)``; computed in fp32.

    x: [..., D]. Each row's result depends on that row alone. count: int64[1], of how many rows, read when it runs (of
    compiled kernels; None: all).
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import norm as kernels

        return kernels.norm(x, how)
    if compiled(x):
        return _compiled(x.contiguous(), None, how, count)
    if x.dtype.itemsize == 4 and not how.centred and how.bias is None:
        return functional.rms_norm(x, (x.shape[-1],), how.weight, how.eps)
    wide = x.float()
    if how.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * wide.square().mean(-1, keepdim=True).add_(how.eps).rsqrt_()
    if how.weight.dtype is x.dtype:
        wide = wide.to(x.dtype).float()
    wide = wide.mul_(how.weight)
    return (wide if how.bias is None else wide.add_(how.bias)).to(x.dtype)


def add_norm(
    x: Tensor, y: Tensor | Partials, how: Norm | None, count: Tensor | None = None, share: float = 1.0
) -> Tensor:
    """``x += share * y``, then the norm of the sum as :func:`norm` has it; without ``how`` x itself is returned.

    x, y: [R, D], contiguous; x is the residual stream and is changed in place. y may be a product that is not finished.
    share: ``share * y`` is rounded before it is added. Returns [R, D].
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import norm as kernels

        return kernels.add_norm(x, y, how, share)
    if isinstance(y, Partials):
        y = y.finished(x.dtype)
    if compiled(x):
        return _compiled(x, y, how, count, share)
    x.add_(y if share == 1.0 else y * share)
    return x if how is None else norm(x, how)


def _compiled(x: Tensor, added: Tensor | None, how: Norm | None, count: Tensor | None, share: float = 1.0) -> Tensor:
    from foresay.verifier.ops.kernels.cpu import rows
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    number = counted(count, x.shape[:-1].numel())
    if how is None:
        assert added is not None, "there is something to be done"
        rows.add(x, added, share, number)
        return x
    out = room(x.shape, x.dtype)
    rows.norm(x, added, (how.weight, how.bias), out, (how.eps, how.centred, share), number)
    return out


def embed(table: Tensor, tokens: Tensor, how: Norm | None, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows of the tokens, the residual stream's beginning, and their norm: [R, D] each.

    Without ``how`` both are one tensor: whatever reads the second must do so before the first is changed. That holds
    of a product that runs before the addition to the stream.
    table: [V, D]. tokens: int64[R]. count: see :func:`~foresay.verifier.ops.take.take_rows`.
    """
    if table.is_cuda:
        from foresay.verifier.ops.kernels import take as kernels

        return kernels.embed(table, tokens, how)
    x = take_rows(table, tokens, count)
    return x, x if how is None else norm(x, how, count)


def pair(
    table: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """The RMS norms of the tokens' rows and of ``hidden`` side by side, [R, 2 D]; and ``hidden``, or its norm, anew.

    table: [V, D]; a token that it does not have is its last one, what is none its first. tokens: int64[R]. hidden:
    [R, D]. weights: [D] each.
    """
    if table.is_cuda:
        from foresay.verifier.ops.kernels import take as kernels

        return kernels.pair(table, tokens, hidden, weights, eps, keep_normed)
    of_token, of_hidden = (Norm(weight, eps) for weight in weights)
    normed = norm(hidden, of_hidden)
    embedded = norm(take_rows(table, known_tokens(tokens, len(table))), of_token)
    return torch.cat((embedded, normed), dim=-1), normed if keep_normed else copy_rows(hidden)
