"""The last tokens of each sequence, without a number on the host: what of them a pass runs, and how they move on.

Legend: S sequences, T tokens that are known of each text's end, F of them that a pass runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, new, padded
from foresay.verifier.ops.records import TextEnd


@op()
def advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    """The first ``taken[s]`` of the emitted tokens come behind the text of each sequence, in place.

    recent: int64[S, T], the last tokens of each. lengths: int32[S], ends: int64[S, 1], how many there are. emitted:
    int64[S, N]; what is behind a sequence's number is not looked at. taken: int64[S], 0 to N. All contiguous.
    ``BROKEN``, which is no token and must not be looked up, becomes 0.
    """
    places = torch.arange(recent.shape[1], device=recent.device) + taken[:, None]
    recent.copy_(torch.cat([recent, emitted], dim=1).gather(1, places).clamp_(min=0))
    lengths.add_(taken)
    ends.add_(taken[:, None])


@advance.kernel
def _advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    sequences, width = recent.shape
    launch(
        "trees.advance_rows", (sequences,), (recent, lengths, ends, emitted, taken, width, emitted.shape[1]),
        {"BLOCK": padded(width)},
    )  # fmt: skip


@op()
def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """The last ``count`` tokens of each text, the root last; or, of one with fewer of them from position ``first`` on,
    those, and behind them the root again.

    recent: int64[S, T], the root last, T at least ``count``. lengths: int32[S], the roots' positions.
    """
    begins = (lengths - (count - 1)).clamp(min=first)
    roots = (lengths - begins).long().clamp(min=0)
    order = torch.arange(count, device=recent.device)
    tokens = recent.gather(1, (order + (recent.shape[1] - 1) - roots[:, None]).clamp(max=recent.shape[1] - 1))
    return TextEnd(tokens, begins, roots + count * torch.arange(len(roots), device=recent.device))


@text_ends.kernel
def _text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    sequences, width = recent.shape
    made = TextEnd(new((sequences, count), recent), new((sequences,), lengths), new((sequences,), recent))
    launch(
        "trees.end_rows", (sequences,), (recent, lengths, *made, width, count, first), {"BLOCK": padded(count)},
    )  # fmt: skip
    return made
