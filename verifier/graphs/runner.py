"""GraphStepRunner: runs steps of a few sequences from captured graphs, one step ahead of the host; all others in parts.

::

    host     launch 1, 2   wait 1   deltas 1 ..   launch 3   wait 2   deltas 2 ..
    GPU      |  step 1     |  step 2       |  step 3      |  step 4 ...

When a step is launched, the next one is launched right after it: all its inputs are on the device. The host then emits
tokens while the GPU continues. If the next plan differs (a text ended, a request arrived), the step that ran ahead is
dropped: it has only written past the committed texts, in pages reserved for it, and a sequence that gets one of those
pages later writes after it, on the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping

from foresay.spec.constrain import Guarded
from foresay.spec.protocols import Drafter, Verifier
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, StepRunner, VerifyResult
from foresay.spec.trace import Stopwatch
from foresay.verifier.graphs.buckets import (
    Bucket,
    Captured,
    Launched,
    between_drafts,
    capturable,
    kept_rows,
    nothing_sampled,
    pages_for,
    reach,
    reserved,
)
from foresay.verifier.graphs.capture import fetched
from foresay.verifier.graphs.state import BatchSlot, write
from foresay.verifier.graphs.step import Outcome, seen


class GraphStepRunner(StepRunner):
    """buckets: captured steps by number of sequences and pages of a table.

    run_ahead: whether the next step is launched before the host has this one's outcome. counts: steps that were
    launched from graphs, that ran ahead and were dropped, and that ran in parts.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        buckets: Mapping[tuple[int, int], Bucket],
        run_ahead: bool = True,
    ) -> None:
        super().__init__(verifier, drafter)
        self.run_ahead = run_ahead
        self.buckets = dict(sorted(buckets.items()))
        self.counts = {"launched": 0, "dropped": 0, "parts": 0}
        self._ahead: Launched | None = None
        self._last: Launched | None = None
        self._before: Captured | None = None

    def run(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        """Launch the step, unless it already runs, and the one after it; wait for its outcome and commit that."""
        launched = self._launched(batch)
        if launched is None:
            self.rest()
            self._last = None
            self.counts["parts"] += 1
            return super().run(batch, watch)
        watch.lap("propose")
        self.counts["launched"] += 1
        if self._may_run_ahead(launched):
            self._ahead = self._launch(launched.captured, launched.batch)
        outcome = launched.captured.step.outcome(launched.arrival.wait())
        watch.lap("forward")
        watch.share("forward", "propose", launched.captured.drafting)
        results = self._arrived(launched, batch, outcome)
        watch.lap("commit")
        return results

    def _arrived(self, launched: Launched, batch: list[ScheduledSequence], outcome: Outcome) -> list[VerifyResult]:
        """Commit a step's outcome."""
        self._last = launched
        before = [sequence.table.length for sequence in launched.sequences]
        results = [self._collect(launched, index, scheduled, outcome) for index, scheduled in enumerate(batch)]
        launched.lengths = [sequence.table.length for sequence in launched.sequences]
        rows = [after - length for after, length in zip(launched.lengths, before, strict=True)]
        if rows != outcome.rows[: len(rows)]:  # the host committed fewer tokens than the device
            self.rest()
            self._last = None
        elif self._ahead is not None:
            self._ahead.lengths = launched.lengths
        return results

    def ahead(self, sequence: SequenceState) -> int:
        """Rows that the step ahead may write, and the one that will be launched after it."""
        ahead = self._ahead
        return kept_rows(ahead.captured) if ahead is not None and sequence in ahead.sequences else 0

    def rest(self) -> None:
        """Drop the step that runs ahead; it ends by itself."""
        if self._ahead is not None:
            self.counts["dropped"] += 1
            self._ahead = self._last = None

    def _launched(self, batch: list[ScheduledSequence]) -> Launched | None:
        """Launch the step of this plan; None if it has to run in parts."""
        captured, sequences = self._captured(batch), [scheduled.sequence for scheduled in batch]
        if captured is None:
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and captured is ahead.captured and ahead.stands(sequences):
            return ahead
        if ahead is not None:
            self.counts["dropped"] += 1
            self._last = None
        return self._begin(captured, batch)

    def _captured(self, batch: list[ScheduledSequence]) -> Captured | None:
        """The step that can run this plan; None if none can."""
        masks = sum(scheduled.sequence.constraint is not None for scheduled in batch)
        if not all(capturable(scheduled) for scheduled in batch) or (masks and len(batch) > 1):
            return None
        bucket = self._bucket([scheduled.sequence for scheduled in batch])
        return None if bucket is None else bucket.step(batch)

    def _bucket(self, sequences: list[SequenceState]) -> Bucket | None:
        """The smallest bucket that fits these sequences and their tables, including the step ahead."""
        for (size, pages), bucket in self.buckets.items():
            rows = max(map(reach, bucket.steps))
            if len(sequences) <= size and all(pages_for(s, rows) <= pages for s in sequences):
                return bucket
        return None

    def _begin(self, captured: Captured, batch: list[ScheduledSequence]) -> Launched | None:
        """Launch the step of a plan; inputs that the device does not have yet are written first."""
        sequences, state = [scheduled.sequence for scheduled in batch], captured.state
        if not reserved(sequences, captured.proposer.shape.nodes) or not captured.proposer.prepare(sequences):
            return None
        last = self._last
        if last is None or last.captured.state is not state or not last.knows(sequences):
            state.join(
                [BatchSlot(s.table.pages, s.table.length, s.tokens, s.sampling, s.noise.seed) for s in sequences]
            )
        return self._launch(captured, batch)

    def _launch(self, captured: Captured, batch: list[ScheduledSequence]) -> Launched:
        sequences = [scheduled.sequence for scheduled in batch]
        pages = [list(sequence.table.pages) for sequence in sequences]
        lengths = [sequence.table.length for sequence in sequences]
        captured.state.write_tables(pages, lengths)
        captured.proposer.write(batch)
        if sequences[0].constraint is None:
            captured.launch()
        else:
            self._launch_masked(captured, sequences[0].constraint)
        return Launched(captured, batch, lengths, pages, captured.step.fetched())

    def _launch_masked(self, captured: Captured, constraint: Guarded) -> None:
        """The step in two launches: between them the host reads the tree and writes the masks of its nodes."""
        assert captured.with_stop is not None, "a bucket of one sequence"
        step, parts = captured.step, captured.with_stop
        parts.run(0)
        tree = seen(fetched(step.seen).wait()[0], captured.proposer.name)
        allowed = constraint.allowed(tree)
        write(step.allowed[: len(allowed)], allowed)
        parts.run(1)

    def _may_run_ahead(self, launched: Launched) -> bool:
        """Whether the step after this one can be launched now, and its pages are reserved."""
        captured, sequences = launched.captured, launched.sequences
        if not self.run_ahead or sequences[0].constraint is not None:
            return False
        if any(s.most_levels <= captured.proposer.shape.levels for s in sequences):
            return False  # this step may be the text's last
        if between_drafts(captured, sequences) or not self._stays(launched):
            return False
        return reserved(sequences, kept_rows(captured)) or reserved(sequences, reach(captured))

    def _stays(self, launched: Launched) -> bool:
        """Whether the next plan is likely to be the same: always without a budget; with one, if it was the same before;
        never if the host does lookups first."""
        before, self._before = self._before, launched.captured
        if all(scheduled.plan.why is None for scheduled in launched.batch):
            return True
        looked = any(share.tree is not None for scheduled in launched.batch for share in scheduled.plan.shares)
        return before is launched.captured and not looked

    def _collect(self, launched: Launched, index: int, scheduled: ScheduledSequence, outcome: Outcome) -> VerifyResult:
        sequence, proposer = scheduled.sequence, launched.captured.proposer
        tree, verified = outcome.of(index, proposer.name)
        tree = proposer.arrived(sequence, index, tree, outcome.more)
        result = self.emitted(scheduled, tree, verified, lambda: nothing_sampled(sequence))
        proposer.collected(sequence, tree, result.rows)
        return result
