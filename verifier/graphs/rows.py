"""Rows of a captured pass: nodes below the committed texts of a bucket's sequences, the same number for each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verifier.graphs.proposer import chain_columns
from verifier.graphs.state import StepState
from verifier.ops.eager import compiled
from verifier.ops.lay_out import lay_out
from verifier.ops.tree_attention import PagedRows
from verifier.paged_rows import Group, StaticRows


class Nodes(NamedTuple):
    """F nodes of each sequence that one pass computes.

    tokens: int64[S, F]. numbers: int64[S, F], which node each is: its slot past the text. words: int64[S, F], its path.
    depths: int32[S, F].
    """

    tokens: Tensor
    numbers: Tensor
    words: Tensor
    depths: Tensor


def rows_of(state: StepState, nodes: Nodes, back: int = 0, wanted: Tensor | None = None) -> tuple[StaticRows, Tensor]:
    """The rows of a pass, and int64[S, F], the slot of each.

    back: the nodes hang so far above the end of the text: the last ``back`` committed tokens are among them. wanted:
    int64[W], the rows whose logits are needed; None: all.
    """
    size, count = nodes.tokens.shape
    lengths = state.lengths if not back else (state.lengths - back).clamp(min=0)
    rows = size * count
    paged = PagedRows(
        tables=state.tables,
        page_size=state.page_size,
        lengths=lengths,
        offsets=state.offsets(count),
        words=nodes.words.flatten(),
        depths=nodes.depths.flatten(),
    )
    if compiled(lengths):  # its attention has to find both anyway
        places = paged.found(rows)
        positions, slots = places.positions, places.own
    else:
        positions, slots = lay_out(state.tables, state.page_size, lengths, nodes.depths, nodes.numbers, state.live)
    static = StaticRows(
        tokens=nodes.tokens.flatten(),
        positions=positions,
        slots=slots,
        groups=(Group(slice(0, rows), paged),),
        live=rows,
        wanted=wanted,
    )
    return static, slots.view(size, count)


def chain_words(sequences: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and words, int64[S, F], and depths, int32[S, F], of the first ``count`` nodes of chains."""
    parents, words, depths = chain_columns(sequences, count, device)
    return parents + 1, words, depths
