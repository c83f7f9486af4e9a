"""The samples of one sequence's tree: at every node the token that plain decoding would take there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.spec.adjust import paths_of
from foresay.spec.errors import ForesayError, InvalidRequest, NumericalError
from foresay.spec.sample import Unsampled
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree

GRAMMAR = "the grammar"


@dataclass(slots=True)
class Nodes:
    """The nodes of one sequence's tree behind a pass.

    logits: fp32[N, V], their rows, raw until they are changed as the request wants them, and after that too where its
    log-probabilities are read from them. banned: bool[N, V], what a grammar rules out. finite: whether the root's raw
    row had a largest number; None while it is there to be looked at.
    """

    sequence: SequenceState
    tree: DraftTree
    logits: Tensor
    banned: Tensor | None = None
    finite: bool | None = None

    @torch.inference_mode()
    def unsampled(self) -> Unsampled:
        """What is to be sampled from, as the request wants it: that is written where the pass left its logits."""
        sequence = self.sequence
        # The token sampled at depth d sits one position past the node: tokens count from 0, the root is the last.
        positions = [len(sequence.tokens) + depth for depth in self.tree.depths]
        wanted, early = self.logits, _early(sequence, positions)
        if sequence.adjustment is not None or self.banned is not None or early or sequence.forced is not None:
            changed = wanted.cpu()  # what a device has goes there and back
            self.finite = _finite(changed[0])
            if sequence.sampling.logprobs is not None:
                self.logits = changed.clone()
            self._adjust(changed, early)
            if sequence.forced is not None:
                _leave_recorded(changed, sequence.forced, [place - sequence.prompt_length for place in positions])
            if wanted.device.type != "cpu":
                wanted.copy_(changed)
        return Unsampled(self.tree, wanted, sequence.sampling, sequence.noise, positions)

    def why_nothing(self) -> ForesayError:
        """Why no token could be sampled at the root."""
        finite = _finite(self.logits[0]) if self.finite is None else self.finite
        return _why_banned(self.sequence) if finite else NumericalError("the model's logits are not finite")

    def _adjust(self, logits: Tensor, early: list[int]) -> None:
        sequence, tree, adjustment = self.sequence, self.tree, self.sequence.adjustment
        if adjustment is not None:
            paths = paths_of(tree.tokens, tree.parents) if adjustment.by_path else []
            adjustment.apply(logits, sequence.tokens, paths)
        if self.banned is not None:
            logits.masked_fill_(self.banned, -math.inf)
        if early:
            logits[torch.tensor(early)[:, None], torch.tensor(sorted(sequence.stop_ids))] = -math.inf


def _early(sequence: SequenceState, positions: Sequence[int]) -> list[int]:
    """Rows whose token would be output number ``min_tokens`` or earlier: they cannot sample a stop token."""
    last = sequence.prompt_length + sequence.sampling.min_tokens
    return [row for row, position in enumerate(positions) if position < last] if sequence.stop_ids else []


def _leave_recorded(logits: Tensor, recorded: Sequence[int], places: Sequence[int]) -> None:
    """Leave nothing but the recorded token of each place, where a trace has one (bench: forced samples)."""
    sound = logits.isfinite().any(dim=1) & ~logits.isnan().any(dim=1)
    for row, place in enumerate(places):
        if place < len(recorded) and sound[row]:
            logits[row] = -math.inf
            logits[row, recorded[place]] = 0.0


def _finite(row: Tensor) -> bool:
    """Whether there is a largest number in fp32[V]: NaN counts as larger than any."""
    return bool(row.max().isfinite())


def _why_banned(sequence: SequenceState) -> ForesayError:
    """What of the request leaves no token."""
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
