"""A step on its way to the GPU or back, and what has to be known before one is launched."""

from __future__ import annotations

from dataclasses import dataclass

from foresay.kvpaging import OutOfPages
from foresay.spec.errors import ForesayError, InvalidRequest, NumericalError
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence
from foresay.verifier.graphs.buckets import Captured
from foresay.verifier.graphs.capture import Arrival
from foresay.verifier.graphs.plain import RootOnly

#: Rows past what two steps may write, for which pages are kept too.
_MORE_ROWS = 64


@dataclass(slots=True)
class Launched:
    """A step on its way, or the last that arrived.

    lengths: committed tokens of each sequence before it (of the last one: after it). pages: the tables as it sees them.
    """

    captured: Captured
    batch: list[ScheduledSequence]
    lengths: list[int]
    pages: list[list[int]]
    arrival: Arrival

    @property
    def sequences(self) -> list[SequenceState]:
        """Those it runs."""
        return [scheduled.sequence for scheduled in self.batch]

    def knows(self, sequences: list[SequenceState]) -> bool:
        """Whether the device has these sequences, as long as the host has them."""
        return sequences == self.sequences and [s.table.length for s in sequences] == self.lengths

    def stands(self, sequences: list[SequenceState]) -> bool:
        """Whether it runs on what the host has: its outcome is that of a step launched now."""
        return self.knows(sequences) and all(
            sequence.table.pages[: len(pages)] == pages for sequence, pages in zip(sequences, self.pages, strict=True)
        )


def capturable(scheduled: ScheduledSequence) -> bool:
    """Whether this step needs nothing that only the host can do."""
    sequence, sampling = scheduled.sequence, scheduled.sequence.sampling
    early = bool(sequence.stop_ids) and sequence.output_length < sampling.min_tokens
    return not (
        scheduled.prefill
        or scheduled.shape is None
        or scheduled.forced
        or early
        or sequence.adjustment is not None
        or sequence.forced is not None
        or sequence.prediction is not None
        or sampling.logprobs is not None
    )


def nothing_sampled(sequence: SequenceState) -> ForesayError:
    """Why no token could be sampled."""
    finite = "the model's logits are not finite"
    if sequence.constraint is None:
        return NumericalError(finite)
    return InvalidRequest(sequence.constraint.field, f"no token is allowed here: the grammar leaves none, or {finite}")


def reach(captured: Captured) -> int:
    """Rows past the committed length that a step and the one after it may write."""
    shape = captured.proposer.shape
    return shape.levels + 1 + shape.nodes


def kept_rows(captured: Captured) -> int:
    """The same and some more: pages that are there already need not be sent to the device while it runs."""
    return reach(captured) + _MORE_ROWS


def between_drafts(captured: Captured, sequences: list[SequenceState]) -> bool:
    """Whether this is a step without drafts that drafting ones come before and after."""
    proposer = captured.proposer
    return isinstance(proposer, RootOnly) and proposer.beside is not None and any(s.speculate for s in sequences)


def pages_for(sequence: SequenceState, rows: int) -> int:
    """Pages of a table that has room for so many rows past the committed ones."""
    return sequence.table.pool.pages_for(sequence.table.length + rows)


def reserved(sequences: list[SequenceState], rows: int) -> bool:
    """Make so many rows past each text writable; False if there are too few pages."""
    try:
        for sequence in sequences:
            sequence.table.reserve(rows)
    except OutOfPages:
        return False
    return True
