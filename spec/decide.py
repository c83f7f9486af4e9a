"""The draws of one sequence's tree: at every node the token that plain decoding would take there."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from spec.adjust import paths_of
from spec.draw import BROKEN, Undrawn
from spec.errors import ForesayError, InvalidRequest, NumericalError
from spec.sequence import Sequence
from spec.tree import DraftTree

GRAMMAR = "the grammar"
#: :meth:`spec.protocols.Verifier.draw`.
Draw = Callable[[Many[Undrawn]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one sequence's tree behind a pass.

    logits: fp32[N, V], their raw rows, which are left as they are. banned: bool[N, V], what a grammar rules out.
    """

    sequence: Sequence
    tree: DraftTree
    logits: Tensor
    banned: Tensor | None = None

    def undrawn(self) -> Undrawn:
        """What is to be drawn from, as the request wants it."""
        sequence = self.sequence
        # The token drawn at depth d sits one position past the node: tokens are numbered from 0, the root is the last.
        positions = [len(sequence.tokens) + depth for depth in self.tree.depths.tolist()]
        adjusted = _adjusted(sequence, self.tree, positions, self.logits, self.banned)
        return Undrawn(adjusted, sequence.sampling, sequence.noise, positions)


def decide(draw: Draw, nodes: Many[Nodes]) -> list[Tensor]:
    """int64[N] of each sequence, on the host: the draw at every node; ``BROKEN`` where none can be made."""
    rows = [each.undrawn() for each in nodes]
    drawn = draw(rows)
    return [_forced(each.sequence, row, draws) for each, row, draws in zip(nodes, rows, drawn, strict=True)]


def _forced(sequence: Sequence, rows: Undrawn, drawn: Tensor) -> Tensor:
    """The draws, or what was recorded instead."""
    if sequence.forced is None:
        return drawn
    return torch.tensor([_recorded(sequence, *pair) for pair in zip(rows.positions, drawn.tolist(), strict=True)])


def _adjusted(
    sequence: Sequence, tree: DraftTree, positions: Many[int], logits: Tensor, banned: Tensor | None
) -> Tensor:
    """The rows as the request wants them; the very same tensor if it leaves them alone."""
    early = _early(sequence, positions)
    adjustment = sequence.adjustment
    if adjustment is None and banned is None and not early:
        return logits
    logits = logits.clone()
    if adjustment is not None:
        paths = paths_of(tree.tokens.tolist(), tree.parents.tolist()) if adjustment.by_path else []
        adjustment.apply(logits, sequence.tokens, paths)
    if banned is not None:
        logits.masked_fill_(banned, -math.inf)
    if early:
        logits[torch.tensor(early)[:, None], torch.tensor(sorted(sequence.stop_ids))] = -math.inf
    return logits


def _early(sequence: Sequence, positions: Many[int]) -> list[int]:
    """Rows whose token would be output number ``min_tokens`` or earlier: they cannot draw a stop token."""
    last = sequence.prompt_length + sequence.sampling.min_tokens
    return [row for row, position in enumerate(positions) if position < last] if sequence.stop_ids else []


def _recorded(sequence: Sequence, position: int, drawn: int) -> int:
    """The recorded token of this position, where the trace has one (bench: forced draws)."""
    index = position - sequence.prompt_length
    if sequence.forced is None or index >= len(sequence.forced) or drawn == BROKEN:
        return drawn
    return sequence.forced[index]


def why_nothing(sequence: Sequence, row: Tensor) -> ForesayError:
    """Why no token could be drawn. row: fp32[V], the raw logits of the node."""
    if bool(row.isnan().any()) or bool(row.isposinf().any()) or not bool(row.isfinite().any()):
        return NumericalError("the model's logits are not finite")
    sampling = sequence.sampling
    asked = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "min_tokens": bool(_early(sequence, [len(sequence.tokens)])),
        GRAMMAR: sequence.constraint is not None,
    }
    names = [name for name, used in asked.items() if used]
    field = sequence.constraint.field if sequence.constraint is not None and names[0] == GRAMMAR else names[0]
    together = f" together with {' and '.join(names[1:])}" if names[1:] else ""
    return InvalidRequest(field, f"no token is allowed here: {names[0]}{together} leaves none")
