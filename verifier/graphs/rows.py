"""The rows of a captured pass: nodes after the committed texts of a bucket's sequences, the same number for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.forward_batch import RowGroup, StaticRows
from foresay.verifier.graphs.proposer import chain_columns
from foresay.verifier.graphs.state import StepState
from foresay.verifier.ops import attention
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import AttentionMetadata
from foresay.verifier.ops.trees import lay_out, text_ends


class Nodes(NamedTuple):
    """F nodes of each sequence that one pass computes.

    tokens: int64[S, F]. numbers: int64[S, F], of the nodes: their slots past the text. words: int64[S, F], their paths.
    depths: int32[S, F].
    """

    tokens: Tensor
    numbers: Tensor
    words: Tensor
    depths: Tensor


def rows_of(
    state: StepState,
    nodes: Nodes,
    lengths: Tensor | None = None,
    logits_indices: Tensor | None = None,
    live: bool = False,
    store: KVStore | None = None,
    whole: bool = False,
) -> StaticRows:
    """The rows of a pass.

    lengths: int32[S], the position of each tree's first node; None: that of the root. logits_indices: int64[W], the
    rows whose logits are needed, one for each sequence if not all; None: all. live: leave padding out if a CPU's
    kernels support it: its rows and their slots are then undefined. store: whose window pages and recurrent states they
    have too; None: they have neither. whole: whether they are all nodes of their trees, in order.
    """
    how = nodes, state.lengths if lengths is None else lengths, logits_indices, live, whole
    rows = _in_tables(state, state.tables, *how)
    if store is not None and state.window_tables is not None and store.windows is not None:
        rows = replace(rows, windowed=_in_tables(state, state.window_tables, *how))
    recurrent = store is not None and store.states is not None
    return state.states.with_states(rows) if recurrent and state.states is not None else rows


def followed_by(trees: StaticRows, prompt: StaticRows) -> StaticRows:
    """The rows of trees, and after them those of a prompt: with the logits of all nodes, and of the prompt's requested
    rows."""
    count = len(trees.tokens)
    assert prompt.logits_indices is not None, "logits are those of rows"
    nodes = torch.arange(count, device=trees.tokens.device)
    texts = [RowGroup(slice(count + at.rows.start, count + at.rows.stop), at.metadata) for at in prompt.groups]
    return StaticRows(
        torch.cat((trees.tokens, prompt.tokens)),
        torch.cat((trees.positions, prompt.positions)),
        torch.cat((trees.slots, prompt.slots)),
        (*trees.groups, *texts),
        torch.cat((nodes, prompt.logits_indices + count)),
        windowed=followed_by(trees.windowed, prompt.windowed) if trees.windowed and prompt.windowed else None,
    )


def _in_tables(
    state: StepState,
    tables: Tensor,
    nodes: Nodes,
    lengths: Tensor,
    logits_indices: Tensor | None,
    live: bool,
    whole: bool,
) -> StaticRows:
    """The same in these pages, int32[S, P]."""
    size, count = nodes.tokens.shape
    words, depths = nodes.words.flatten(), nodes.depths.flatten()
    paged = AttentionMetadata(tables, state.page_size, lengths, state.offsets(count), words, depths)
    known: Tensor | None = None
    if compiled(lengths):  # its attention computes both anyway
        if live:
            known, paged.sequences = state.live_rows(count), state.live_rows(1)
        plan = attention.plan_attention(paged, size * count, known)
        positions, slots = plan.positions, plan.row_slots
    else:
        positions, slots = lay_out(tables, state.page_size, lengths, nodes.depths, nodes.numbers, state.live)
        paged.fuse_rope = whole and attention.ROTATED_WITHIN
        paged.tails = attention.tail_slots(paged) if attention.SLOTS_ONCE else None
    groups = (RowGroup(slice(0, size * count), paged),)
    return StaticRows(nodes.tokens.flatten(), positions, slots, groups, logits_indices, known, paged.sequences)


class TextEnds:
    """Passes over the last tokens of every text, ending with the roots: the first pass of a drafter with its own KV.

    It need not know which of these rows are new: a valid one is rewritten with the same values, since it is a function
    of only the text. count: how many tokens. first: the position below which there are no rows. A text with fewer
    tokens has its root further in front; the rows after it are scratch, as their slots are.
    """

    def __init__(self, sequences: int, count: int, first: int, device: torch.device) -> None:
        self.count, self._first = count, first
        self._numbers, self._words, self._depths = chain_words(sequences, count, device)
        self._before = self._numbers - 1

    def rows(self, state: StepState, known: Callable[[Tensor], Tensor] | None = None, live: bool = False) -> StaticRows:
        """The rows; the roots' logits are requested. known: maps the text's tokens to the model's. live: see
        :func:`rows_of`."""
        end = text_ends(state.recent, state.lengths, self.count, self._first)
        nodes = Nodes(end.tokens if known is None else known(end.tokens), self._numbers, self._words, self._depths)
        return rows_of(state, nodes, end.lengths, end.roots, live)

    def slots_before(self, state: StepState) -> Tensor:
        """int64[S * F]: the slot of the token before each."""
        begins = text_ends(state.recent, state.lengths, self.count, self._first).lengths
        return lay_out(state.tables, state.page_size, begins, self._depths, self._before, state.live)[1]


def chain_words(sequences: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and words, int64[S, F], and depths, int32[S, F], of the first ``count`` nodes of chains."""
    parents, words, depths = chain_columns(sequences, count, device)
    return parents + 1, words, depths
