"""SequenceState: everything the engine knows of one running request."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foresay.kvpaging import PageTable
from foresay.spec.adjust import Adjustment
from foresay.spec.errors import ForesayError
from foresay.spec.request import FinishReason, TokenLogprobs
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import SequenceTrace
from foresay.spec.tree import MAX_NODES

if TYPE_CHECKING:
    from foresay.spec.constrain import Guarded


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence: tokens, pages, parameters, progress.

    tokens: prompt and output so far; the first ``resumed_at`` of the output were written by engines before. With no
    step in flight and the prompt processed, ``table.length == len(tokens) - 1``: the last token is the root, whose KV
    is not stored yet. limit: the most tokens (prompt and output) it may reach. stop_ids: tokens that end it.
    prediction: what the request expects as output. adjustment: what it changes about its logits. constraint: the
    grammar of its output. leader: the sequence whose prompt KV it waits for. prompt_logprobs: entries of the prompt's
    tokens so far; None if they are not asked for. speculate: whether more than the root may be verified in a step.
    draft_method: who may draft, by name; "" for anybody. most_drafted: the deepest draft that is asked for. aside:
    whether KV is neither taken from others nor left to them.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    table: PageTable
    noise: Noise
    limit: int
    stop_ids: frozenset[int]
    salt: str = ""
    forced: list[int] | None = None
    prediction: list[int] | None = None
    adjustment: Adjustment | None = None
    constraint: Guarded | None = None
    leader: SequenceState | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    resumed_at: int = 0
    speculate: bool = True
    draft_method: str = ""
    most_drafted: int = MAX_NODES
    aside: bool = False
    trace: SequenceTrace = field(default_factory=SequenceTrace)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: ForesayError | None = None

    @property
    def output_length(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Rows still to compute before the root: prompt tokens (or, after preemption, any tokens) without KV."""
        return len(self.tokens) - 1 - self.table.length

    @property
    def most_levels(self) -> int:
        """The deepest draft that is wanted and could still be emitted: the bonus token fills the last place."""
        return min(self.limit - len(self.tokens) - 1, self.most_drafted)

    @property
    def scoring(self) -> bool:
        """Whether rows of the prompt are needed for their logits, not only for their KV."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether the sequence will emit no more."""
        return self.finish_reason is not None

    def fail(self, error: ForesayError) -> None:
        """End with an error that the client reads, unless it has ended already."""
        if not self.finished:
            self.finish_reason, self.error = "error", error

    def replay(self) -> None:
        """Count the output that engines before wrote, and lead the grammar along it."""
        for token in self.tokens[self.prompt_length :]:
            if self.adjustment is not None:
                self.adjustment.count(token)
            if self.constraint is not None:
                self.constraint.advance([token])  # one by one: its time is by the call, and no run was shorter

    def append(self, run: list[int]) -> list[int]:
        """Append a run of emitted tokens one by one, as plain decoding would, up to the first that ends the sequence.

        Returns the tokens really appended.
        """
        for count, token in enumerate(run, start=1):
            self.tokens.append(token)
            if self.adjustment is not None:
                self.adjustment.count(token)
            if token in self.stop_ids and self.output_length > self.sampling.min_tokens:
                self.finish_reason, self.stop_token = "stop", token
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
            if self.finished:
                return run[:count]
        return run


if not TYPE_CHECKING:  # else a type checker would let any name through

    def __getattr__(name: str) -> type[SequenceState]:
        """Drafters of one's own may still say ``Sequence``."""
        if name != "Sequence":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn("foresay.spec.sequence.Sequence is now called SequenceState", FutureWarning, stacklevel=2)
        return SequenceState
