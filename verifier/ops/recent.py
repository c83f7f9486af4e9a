"""The last tokens of each sequence, moved on by what a step emitted, without a number on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from verifier.ops.eager import compiled


def gather_recent(recent: Tensor, emitted: Tensor, lengths: Tensor) -> Tensor:
    """The last T tokens after the first ``lengths[s]`` of the emitted ones came behind them.

    recent: int64[S, T]. emitted: int64[S, N]; what is behind a sequence's length is not looked at. lengths: int64[S], 0
    to N. Returns int64[S, T], a new tensor; ``BROKEN``, which is no token and must not be looked up, is 0 in it.
    """
    if recent.is_cuda:
        from verifier.ops.kernels import recent as kernels

        return kernels.gather_recent(recent, emitted, lengths).clamp_(min=0)
    if compiled(recent):
        from verifier.ops.kernels.cpu import accept as of_cpu

        return of_cpu.gather_recent(recent, emitted, lengths)
    places = torch.arange(recent.shape[1], device=recent.device) + lengths[:, None]
    return torch.cat([recent, emitted], dim=1).gather(1, places).clamp_(min=0)
