"""GraphStepRunner: runs steps of a few sequences from captured graphs, one step ahead of the host; all others in parts.
A stretch of a prompt is in the same graph, if it fits; no step runs ahead of that.

::

    host     launch 1, 2   wait 1   deltas 1 ..   launch 3   wait 2   deltas 2 ..
    GPU      |  step 1     |  step 2       |  step 3      |  step 4 ...

When a step is launched, the next one is launched right after it: all its inputs are on the device. The host then emits
tokens while the GPU continues. If the next plan differs (a text ended, a request arrived), the step that ran ahead is
dropped: it has only written past the committed texts, in pages reserved for it, and a sequence that gets one of those
pages later writes after it, on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from foresay.kvpaging.states import recurrent_state
from foresay.spec.errors import NumericalError
from foresay.spec.logits import NOT_FINITE, why_nothing
from foresay.spec.protocols import Drafter, Verifier
from foresay.spec.sequence import SequenceState
from foresay.spec.step import Raw, ScheduledSequence, StepRunner, VerifyResult, edits_and_raw, rows_of
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import DraftTree
from foresay.verifier.graphs.buckets import (
    Launched,
    capturable,
    edited,
    kept_rows,
    needs_stop,
    readable,
    reserved,
)
from foresay.verifier.graphs.capture import fetched
from foresay.verifier.graphs.state import BatchSlot
from foresay.verifier.graphs.step import Outcome, SpeculativeStep
from foresay.verifier.ops.sample import edit_logits

#: Why no token could be sampled, where no request changed the logits.
_BROKEN = partial(NumericalError, NOT_FINITE)


class GraphStepRunner(StepRunner):
    """buckets: captured steps by number of sequences and pages of a table.

    run_ahead: whether the next step is launched before the host has this one's outcome. counts: steps that were
    launched from graphs, that ran ahead and were dropped, and that ran in parts.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        buckets: Mapping[tuple[int, int], Sequence[SpeculativeStep]],
        run_ahead: bool = True,
    ) -> None:
        super().__init__(verifier, drafter)
        self.run_ahead = run_ahead
        self.buckets = dict(sorted(buckets.items()))
        self.counts = {"launched": 0, "dropped": 0, "parts": 0}
        self._ahead: Launched | None = None
        self._last: Launched | None = None
        self._before: SpeculativeStep | None = None
        proposers = [step.proposer for steps in self.buckets.values() for step in steps]
        self._drafts = any(proposer.shape.levels for proposer in proposers)
        self._roots = any(proposer.takes_roots for proposer in proposers)

    def run(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        """Launch the step, unless it already runs, and the one after it; wait for its outcome and commit that."""
        texts = [scheduled for scheduled in batch if not scheduled.prefill]
        prompts = batch[len(texts) :]
        launched = self._launched(texts, prompts, watch)
        if launched is None:
            self.rest()
            self._last = None
            self.counts["parts"] += 1
            return super().run(batch, watch)
        if not launched.step.timed:
            watch.lap("propose")
        self.counts["launched"] += 1
        if not prompts and self._may_run_ahead(launched):
            self._ahead = self._launch(launched.step, launched.batch, watch, 1)
        read = [self._read(launched, prompt, None) for prompt in prompts if prompt.shape is None]
        outcome = launched.step.outcome(launched.arrival.wait())
        self.woken = outcome.woken
        if not launched.step.timed:
            watch.lap("forward")
            watch.share("forward", "propose", launched.step.drafting)
        results = [*self._arrived(launched, texts, outcome), *read]
        results += [self._read(launched, prompt, outcome.first) for prompt in prompts if prompt.shape is not None]
        watch.lap("commit")
        return results

    def _read(self, launched: Launched, prompt: ScheduledSequence, first: int | None) -> VerifyResult:
        """Commit the rows of a prompt. first: the sample after it; None if more of it follows: then drafters compute
        their own rows of it while the step still runs."""
        sequence, readers = prompt.sequence, launched.step.proposer.readers
        root = DraftTree.chain(sequence.tokens[-1:])
        tree, verified = (None, None) if first is None else (root, ([first], [0]))

        def stored(path: list[int]) -> None:
            for reader in readers:
                reader.stored(sequence, prompt.prefill + len(path))

        return self._commit(prompt, root, tree, verified, _BROKEN, stored)

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
            for table in (sequence.table for sequence in launched.sequences):
                table.truncate(table.length)  # recurrent states may be those of a later token
        elif self._ahead is not None:
            self._ahead.lengths = launched.lengths
        return results

    def ahead(self, sequence: SequenceState) -> int:
        """Rows that the step ahead may write, and the one that will be launched after it."""
        ahead = self._ahead
        return kept_rows(ahead.step) if ahead is not None and sequence in ahead.sequences else 0

    def rest(self) -> None:
        """Drop the step that runs ahead; it ends by itself."""
        if self._ahead is not None:
            self.counts["dropped"] += 1
            self._ahead = self._last = None

    def _launched(
        self, batch: list[ScheduledSequence], prompts: list[ScheduledSequence], watch: Stopwatch
    ) -> Launched | None:
        """Launch the step of this plan; None if it has to run in parts. prompts: sequences whose prompt is computed."""
        step, sequences = self._captured(batch, prompts), [scheduled.sequence for scheduled in batch]
        if step is None:
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and step is ahead.step and ahead.is_valid(sequences):
            return ahead
        if ahead is not None:
            self.counts["dropped"] += 1
            self._last = None
        for prompt in prompts:
            assert step.prompt is not None, "one with room for it was chosen"
            step.prompt.write([rows_of(prompt, DraftTree.chain(prompt.sequence.tokens[-1:]))])
        return self._begin(step, batch, watch)

    def _captured(self, batch: list[ScheduledSequence], prompts: list[ScheduledSequence]) -> SpeculativeStep | None:
        """The step that can run this plan; None if none can."""
        if not self._roots and not any(scheduled.drafts for scheduled in batch):
            return None  # found before many of them are asked
        if not batch or len(prompts) > 1 or not (all(map(capturable, batch)) and all(map(readable, prompts))):
            return None
        stops, sequences = any(map(needs_stop, batch)), [scheduled.sequence for scheduled in batch]
        rows = sum(prompt.prefill + prompt.nodes for prompt in prompts)
        for step in self._with_room(sequences):
            able = rows in step.prompt_rows and (step.stopping is not None or not stops)
            if able and all(map(step.proposer.takes, batch)):
                return step
        return None

    def _with_room(self, sequences: list[SequenceState]) -> Iterator[SpeculativeStep]:
        """Those with room for these sequences and their tables, including the step ahead; the smallest first."""
        for (size, pages), steps in self.buckets.items():
            rows = max([step.reach for step in steps], default=0)
            fits = len(sequences) <= size
            if fits and all(s.table.pool.pages_for(s.table.length + rows) <= pages for s in sequences):
                yield from steps

    def _begin(self, step: SpeculativeStep, batch: list[ScheduledSequence], watch: Stopwatch) -> Launched | None:
        """Launch the step of a plan; inputs that the device does not have yet are written first."""
        sequences, state = [scheduled.sequence for scheduled in batch], step.state
        if not reserved(sequences, step.proposer.shape.nodes):
            return None
        if not self._wall.ask(step.proposer.name, step.proposer.prepare, sequences):
            return None
        last = self._last
        if last is None or last.step.state is not state or not last.is_current(sequences):
            state.join(
                [BatchSlot(s.table.pages, s.table.length, s.tokens, s.sampling, s.noise.seed) for s in sequences]
            )
        return self._launch(step, batch, watch)

    def _launch(
        self, step: SpeculativeStep, batch: list[ScheduledSequence], watch: Stopwatch, ahead: int = 0
    ) -> Launched:
        """ahead: steps before it whose outcome is not known yet."""
        tables = [scheduled.sequence.table for scheduled in batch]
        pages, lengths = [list(table.pages) for table in tables], [table.length for table in tables]
        targets = [state.commit_pages(ahead) for state in map(recurrent_state, tables) if state is not None]
        step.state.write_tables(pages, lengths, targets)
        step.proposer.write(batch)
        raw = self._launch_with_stop(step, batch) if any(map(needs_stop, batch)) else ()
        if not raw:
            step.run(watch)
        return Launched(step, batch, lengths, pages, step.fetched(), raw)

    def _launch_with_stop(self, step: SpeculativeStep, batch: list[ScheduledSequence]) -> list[Raw]:
        """The step in two launches: between them the host edits the logits of the trees, which it has to wait for if
        anything is drafted. Returns the raw ones."""
        parts, proposer, raw = step.stopping, step.proposer, list[Raw]()
        assert parts is not None and step.logits is not None, "one that may stop was chosen"
        parts.run(0)
        nodes = proposer.shape.nodes
        drafted = Outcome(fetched(step.out).wait().tolist()) if nodes > 1 and any(map(edited, batch)) else None
        for index, scheduled in enumerate(batch):
            root, constraint = scheduled.sequence.tokens[-1:], scheduled.sequence.constraint
            tree = DraftTree.chain(root)
            if drafted is not None and edited(scheduled):
                tree, _ = drafted.of(index, proposer.name)
            allowed = None if constraint is None else constraint.allowed(tree)
            edits, kept = edits_and_raw(scheduled, tree, allowed, partial(step.logits.narrow, 0, index * nodes, nodes))
            if edits is not None:
                edit_logits(step.logits.narrow(0, index * nodes, len(tree)), edits)
            raw.append(kept)
        parts.run(1)
        return raw

    def _may_run_ahead(self, launched: Launched) -> bool:
        """Whether the step after this one can be launched now, and its pages are reserved."""
        step, sequences = launched.step, launched.sequences
        if not self.run_ahead or any(map(needs_stop, launched.batch)):
            return False
        if any(s.limit - len(s.tokens) <= step.proposer.shape.levels + 1 for s in sequences):
            return False  # this step may be the text's last
        if not self._stays(launched):
            return False
        return reserved(sequences, kept_rows(step), 2) or reserved(sequences, step.reach, 2)

    def _stays(self, launched: Launched) -> bool:
        """Whether the next plan is likely to be the same: without a budget always, except of a step without drafts
        between those with drafts; with one, if it was the same before; never if the host does lookups first."""
        before, self._before = self._before, launched.step
        if all(scheduled.plan.why is None for scheduled in launched.batch):
            drafts = self._drafts and self._by_plan is None  # what a budget leaves plain is followed by its like
            between = drafts and any(sequence.speculate for sequence in launched.sequences)
            return bool(launched.step.proposer.shape.levels) or not between
        looked = any(share.tree is not None for scheduled in launched.batch for share in scheduled.plan.shares)
        return before is launched.step and not looked

    def _collect(self, launched: Launched, index: int, scheduled: ScheduledSequence, outcome: Outcome) -> VerifyResult:
        sequence, proposer = scheduled.sequence, launched.step.proposer
        tree, verified = outcome.of(index, proposer.name)
        tree = proposer.arrived(sequence, index, tree, outcome.more)
        raw = launched.raw[index] if launched.raw else None
        broken = _BROKEN if raw is None else lambda: why_nothing(sequence, raw()[0])
        result = self.emitted(scheduled, tree, verified, broken, captured=True)
        self._wall.tell(proposer.name, proposer.collected, sequence, tree, result.rows)
        if raw is not None:
            self.look_at(scheduled, result, raw)
        return result
