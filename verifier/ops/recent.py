"""The last tokens of each sequence, without a number on the host: what of them a pass runs, and how they move on.

Legend: S sequences, T tokens that are known of each text's end, F of them that a pass runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import TextEnd


def advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    """The first ``taken[s]`` of the emitted tokens come behind the text of each sequence, in place.

    recent: int64[S, T], the last tokens of each. lengths: int32[S], ends: int64[S, 1], how many there are. emitted:
    int64[S, N]; what is behind a sequence's number is not looked at. taken: int64[S], 0 to N. All contiguous.
    ``BROKEN``, which is no token and must not be looked up, becomes 0.
    """
    if recent.is_cuda:
        from foresay.verifier.ops.kernels import recent as kernels

        kernels.advance(recent, lengths, ends, emitted, taken)
        return
    recent.copy_(_moved_on(recent, emitted, taken))
    lengths.add_(taken)
    ends.add_(taken[:, None])


def _moved_on(recent: Tensor, emitted: Tensor, taken: Tensor) -> Tensor:
    """int64[S, T]."""
    if compiled(recent):
        from foresay.verifier.ops.kernels.cpu import recent as of_cpu

        return of_cpu.gather_recent(recent, emitted, taken)
    places = torch.arange(recent.shape[1], device=recent.device) + taken[:, None]
    return torch.cat([recent, emitted], dim=1).gather(1, places).clamp_(min=0)


def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """The last ``count`` tokens of each text, the root last; or, of one with fewer of them from position ``first`` on,
    those, and behind them the root again.

    recent: int64[S, T], the root last, T at least ``count``. lengths: int32[S], the roots' positions.
    """
    if recent.is_cuda:
        from foresay.verifier.ops.kernels import recent as kernels

        return kernels.text_ends(recent, lengths, count, first)
    if compiled(recent):
        from foresay.verifier.ops.kernels.cpu import recent as of_cpu

        return of_cpu.text_ends(recent, lengths, count, first)
    begins = (lengths - (count - 1)).clamp(min=first)
    roots = (lengths - begins).long().clamp(min=0)
    order = torch.arange(count, device=recent.device)
    tokens = recent.gather(1, (order + (recent.shape[1] - 1) - roots[:, None]).clamp(max=recent.shape[1] - 1))
    return TextEnd(tokens, begins, roots + count * torch.arange(len(roots), device=recent.device))
