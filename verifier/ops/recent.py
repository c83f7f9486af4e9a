"""The last tokens of each sequence, without a number on the host: what of them a pass runs, and how they move on.

Legend: S sequences, T tokens that are known of each text's end, F of them that a pass runs.
"""

from __future__ import annotations

from typing import NamedTuple

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
        from verifier.ops.kernels.cpu import recent as of_cpu

        return of_cpu.gather_recent(recent, emitted, lengths)
    places = torch.arange(recent.shape[1], device=recent.device) + lengths[:, None]
    return torch.cat([recent, emitted], dim=1).gather(1, places).clamp_(min=0)


class TextEnd(NamedTuple):
    """tokens: int64[S, F]. lengths: int32[S], the position of the first of them. roots: int64[S], which of all the
    roots are."""

    tokens: Tensor
    lengths: Tensor
    roots: Tensor


def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """The last ``count`` tokens of each text, the root last; or, of one with fewer of them from position ``first`` on,
    those, and behind them the root again.

    recent: int64[S, T], the root last, T at least ``count``. lengths: int32[S], the roots' positions.
    """
    if compiled(recent):
        from verifier.ops.kernels.cpu import recent as of_cpu

        return of_cpu.text_ends(recent, lengths, count, first)
    begins = (lengths - (count - 1)).clamp(min=first)
    roots = (lengths - begins).long().clamp(min=0)
    order = torch.arange(count, device=recent.device)
    tokens = recent.gather(1, (order + (recent.shape[1] - 1) - roots[:, None]).clamp(max=recent.shape[1] - 1))
    return TextEnd(tokens, begins, roots + count * torch.arange(len(roots), device=recent.device))
