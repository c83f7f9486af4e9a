"""What a request changes of its logits, and why that may leave no token to sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torch import Tensor

from foresay.spec.adjust import LogitEdits, Path, paths_of
from foresay.spec.errors import ForesayError, InvalidRequest, NumericalError
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree

GRAMMAR = "the grammar"


def edits_of(sequence: SequenceState, tree: DraftTree, allowed: Tensor | None = None) -> LogitEdits | None:
    """What a request changes of the logits of its tree's nodes; None if it leaves them alone.

    allowed: int32[N, ceil(V / 32)], the tokens that a grammar lets follow each node; None: all.
    """
    if allowed is None and sequence.forced is None and not edits_logits(sequence, 0):
        return None
    edits = edits_at(sequence, tree.depths, paths_of(tree.tokens, tree.parents), allowed)
    for node, depth in enumerate(tree.depths):
        edits.recorded += [(node, token) for token in (sequence.forced or ())[sequence.output_length + depth :][:1]]
    return edits


def edits_logits(sequence: SequenceState, depth: int) -> bool:
    """Whether a request changes logits at nodes of this depth, its grammar aside."""
    early = bool(sequence.stop_ids) and sequence.output_length + depth < sequence.sampling.min_tokens
    return early or sequence.adjustment is not None


def edits_at(
    sequence: SequenceState, depths: Sequence[int], paths: Sequence[Path], allowed: Tensor | None = None
) -> LogitEdits:
    """What a request changes at nodes of these depths and paths (tokens from below the root); allowed: see above."""
    adjustment = sequence.adjustment
    edits = LogitEdits() if adjustment is None else adjustment.edits(sequence.tokens, paths)
    if allowed is not None:
        edits.allowed = allowed if edits.allowed is None else allowed & edits.allowed
    edits.banned += product(_early(sequence, depths), sorted(sequence.stop_ids))
    return edits


def why_nothing(sequence: SequenceState, logits: Tensor) -> ForesayError:
    """Why no token could be sampled at the root, whose raw logits are fp32[V]. NaN counts as larger than any number."""
    if not logits.max().isfinite():
        return NumericalError("the model's logits are not finite")
    return _why_banned(sequence)


def _early(sequence: SequenceState, depths: Sequence[int]) -> list[int]:
    """Nodes whose token would be output number ``min_tokens`` or earlier: they cannot sample a stop token."""
    last = sequence.sampling.min_tokens - sequence.output_length
    return [node for node, depth in enumerate(depths) if depth < last] if sequence.stop_ids and last > 0 else []


def _why_banned(sequence: SequenceState) -> ForesayError:
    """What of the request leaves no token."""
    sampling = sequence.sampling
    asked = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "min_tokens": bool(_early(sequence, [0])),
        GRAMMAR: sequence.constraint is not None,
    }
    names = [name for name, used in asked.items() if used]
    field = sequence.constraint.field if sequence.constraint is not None and names[0] == GRAMMAR else names[0]
    together = f" together with {' and '.join(names[1:])}" if names[1:] else ""
    return InvalidRequest(field, f"no token is allowed here: {names[0]}{together} leaves none")
