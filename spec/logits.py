"""A request's logits: what it changes in them, why that may leave no token, and the tokens' log-probabilities.

Log-probabilities are those of the model's own distribution, from raw logits. Each row is computed by itself and its sum
has a fixed order (:func:`row_sum`), so an entry has the same bits whatever tree, batch or chunk its row was part of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from foresay.spec.adjust import LogitEdits, Path, paths_of
from foresay.spec.errors import ForesayError, InvalidRequest, NumericalError
from foresay.spec.request import TokenLogprobs
from foresay.spec.sample import weights_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree

#: Replaces minus infinity, which JSON cannot represent.
IMPOSSIBLE = -9999.0
#: Rows are summed in chunks of this many: so a row's sum never depends on the number of rows or threads.
_SUM_CHUNK = 4096


def logprobs_of(rows: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """One entry per token.

    rows: fp32[N, V], the raw logits that each token was sampled from. count: how many of the likeliest are listed.
    """
    return [_entry(row, token, count) for row, token in zip(rows, tokens, strict=True)]


def _entry(row: Tensor, token: int, count: int) -> TokenLogprobs:
    largest = row.max()
    total = float(largest) + math.log(float(row_sum(weights_of(row, largest)[None])))
    top = _likeliest(row, count)
    values = row[[token, *top]].tolist()
    chosen, *listed = (max(value - total, IMPOSSIBLE) for value in values)
    return TokenLogprobs(token, chosen, list(zip(top, listed, strict=True)))


def _likeliest(row: Tensor, count: int) -> list[int]:
    """The ids of the largest logits, largest first; of equal ones the lower id."""
    if not count:
        return []
    least = row.topk(min(count, len(row))).values[-1]
    ids = (row >= least).nonzero().flatten()
    # A stable sort keeps equal values in the order of their ids.
    order = row[ids].sort(descending=True, stable=True).indices
    top: list[int] = ids[order][:count].tolist()
    return top


def row_sum(values: Tensor) -> Tensor:
    """fp32[N]: the sum of each row, in an order that depends only on the row's length."""
    short = -values.shape[-1] % _SUM_CHUNK
    if short:
        values = functional.pad(values, (0, short))
    chunks = values.view(*values.shape[:-1], -1, _SUM_CHUNK)
    return chunks.sum(dim=-1).sum(dim=-1)


def score_prompt(sequence: SequenceState, logits: Tensor) -> None:
    """Add entries for the prompt tokens that follow the rows of a chunk that is not committed yet."""
    entries, base, count = sequence.prompt_logprobs, sequence.table.length, sequence.sampling.prompt_logprobs
    assert entries is not None and count is not None
    # If it is computed again after preemption, a chunk may lie before the next token to score.
    tokens = sequence.tokens[len(entries) : min(base + len(logits) + 1, sequence.prompt_length)]
    first = len(entries) - 1 - base
    entries += logprobs_of(logits[first : first + len(tokens)].cpu(), tokens, count)


def logprobs_of_run(
    sequence: SequenceState, logits: Tensor, path: list[int], emitted: list[int]
) -> list[TokenLogprobs]:
    """One entry per emitted token, from the raw row of the node it was sampled at."""
    count = sequence.sampling.logprobs
    assert count is not None
    return logprobs_of(logits[torch.tensor(path, dtype=torch.int64)].cpu(), emitted, count)


GRAMMAR, NOT_FINITE = "the grammar", "the model's logits are not finite"


def edits_of(sequence: SequenceState, tree: DraftTree, allowed: Tensor | None = None) -> LogitEdits | None:
    """What a request changes in the logits of its tree's nodes; None if nothing.

    allowed: int32[N, ceil(V / 32)], the tokens that a grammar allows after each node; None: all.
    """
    if allowed is None and sequence.forced is None and not edits_logits(sequence, 0):
        return None
    edits = edits_at(sequence, tree.depths, paths_of(tree.tokens, tree.parents), allowed)
    for node, depth in enumerate(tree.depths):
        edits.recorded += [(node, token) for token in (sequence.forced or ())[sequence.output_length + depth :][:1]]
    return edits


def edits_logits(sequence: SequenceState, depth: int) -> bool:
    """Whether a request changes logits at nodes of this depth, other than by its grammar."""
    early = bool(sequence.stop_ids) and sequence.output_length + depth < sequence.sampling.min_tokens
    return early or sequence.adjustment is not None


def edits_at(
    sequence: SequenceState, depths: Sequence[int], paths: Sequence[Path], allowed: Tensor | None = None
) -> LogitEdits:
    """What a request changes at nodes of these depths and paths (tokens below the root); allowed: see
    :func:`edits_of`."""
    adjustment = sequence.adjustment
    edits = LogitEdits() if adjustment is None else adjustment.edits(sequence.tokens, paths)
    if allowed is not None:
        edits.allowed = allowed if edits.allowed is None else allowed & edits.allowed
    edits.banned += product(_early(sequence, depths), sorted(sequence.stop_ids))
    return edits


def why_nothing(sequence: SequenceState, logits: Tensor) -> ForesayError:
    """Why no token could be sampled at the root, whose raw logits are fp32[V]. NaN counts as larger than any number."""
    if not logits.max().isfinite():
        return NumericalError(NOT_FINITE)
    return _why_banned(sequence)


def _early(sequence: SequenceState, depths: Sequence[int]) -> list[int]:
    """Nodes whose token would be output number ``min_tokens`` or earlier: they cannot sample a stop token."""
    last = sequence.sampling.min_tokens - sequence.output_length
    return [node for node, depth in enumerate(depths) if depth < last] if sequence.stop_ids and last > 0 else []


def _why_banned(sequence: SequenceState) -> ForesayError:
    """Which fields of the request leave no token."""
    sampling = sequence.sampling
    causes = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "min_tokens": bool(_early(sequence, [0])),
        GRAMMAR: sequence.constraint is not None,
    }
    names = [name for name, used in causes.items() if used]
    field = sequence.constraint.field if sequence.constraint is not None and names[0] == GRAMMAR else names[0]
    together = f" together with {' and '.join(names[1:])}" if names[1:] else ""
    return InvalidRequest(field, f"no token is allowed here: {names[0]}{together} leaves none")
