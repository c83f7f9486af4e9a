"""Draws and children of the nodes of several sequences, on the host; computed where their logits are."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from spec.draw import Undrawn
from verifier.ops.children import best_children
from verifier.ops.draw import RowSampling, draw_rows


def draw(rows: Many[Undrawn], token_ids: Tensor | None = None) -> list[Tensor]:
    """int64[N] of each sequence: the draw at its rows, as :func:`verifier.ops.draw.draw_rows` makes it."""
    logits, sampling, ids = _together(rows, token_ids)
    return list(draw_rows(logits, sampling, ids).cpu().split([len(each.positions) for each in rows]))


def children(rows: Many[Undrawn], count: int, token_ids: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """[N, count] of each sequence: tokens and chances, as :func:`verifier.ops.children.best_children` finds them."""
    logits, sampling, ids = _together(rows, token_ids)
    found = best_children(logits, sampling, count, ids)
    counts = [len(each.positions) for each in rows]
    return list(zip(*(part.cpu().split(counts) for part in found), strict=True))


def _together(rows: Many[Undrawn], token_ids: Tensor | None) -> tuple[Tensor, RowSampling, Tensor | None]:
    logits = torch.cat([each.logits for each in rows])
    ids = None if token_ids is None else token_ids.to(logits.device)
    return logits, RowSampling.of_nodes(rows, logits.device), ids
