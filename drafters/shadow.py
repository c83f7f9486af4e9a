"""A drafter that drafts beside the one in use, unverified: what would have been accepted had it been asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from foresay.spec.observer import Observer
from foresay.spec.protocols import Drafter
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import ShadowReport, StepTrace
from foresay.spec.tree import TreeShape
from foresay.spec.walk import Walk

#: Of an engine that nobody asks for reports only the last ones are kept.
_MOST_REPORTS = 1024


class Shadow(Observer):
    """Walks along with every sequence that may speculate and has no grammar (that would prune drafts and force others).
    drafter: one that needs no model, nor the target's features.

    It drafts when the tokens of a step are on their way, and proposes from committed text alone, so it can change
    nothing but the time of the next step.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        assert drafter.needs is None, "a shadow is not shown the target's features"
        self.drafter, self.shape = drafter, shape
        self._walks: dict[str, Walk] = {}
        self._seconds: dict[str, float] = {}
        self._reports: deque[ShadowReport] = deque(maxlen=_MOST_REPORTS)

    def reports(self) -> list[ShadowReport]:
        """Those of the requests that ended since the last call, at most the last thousand or so."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Go on as far as the new tokens lead."""
        for result in results:
            sequence = result.scheduled.sequence
            if sequence.speculate and sequence.constraint is None:
                begun = time.perf_counter()
                self._follow(result, sequence)
                self._charge(sequence.id, begun)

    def _follow(self, result: VerifyResult, sequence: SequenceState) -> None:
        walk = self._walks.get(sequence.id)
        if walk is None:
            walk = self._walks[sequence.id] = Walk(self.drafter, self.shape, sequence)
        if not result.emitted:
            walk.read()
            return
        if walk.begun is None:
            # The step that computes the prompt drafts nothing, whoever drafts.
            walk.begin(result.emitted if result.scheduled.prefill else [])
        walk.follow(sequence.tokens)

    def _charge(self, id: str, begun: float) -> None:
        self._seconds[id] = self._seconds.get(id, 0.0) + time.perf_counter() - begun

    def ended(self, sequence: SequenceState) -> None:
        """Take the last steps, and report the request, if it had any."""
        walk = self._walks.pop(sequence.id, None)
        if walk is None:
            return
        begun = time.perf_counter()
        if walk.begun is not None:
            walk.follow(sequence.tokens, over=True)
            walk.cut(len(sequence.tokens))
        walk.close()
        self._charge(sequence.id, begun)
        seconds = self._seconds.pop(sequence.id)
        if walk.begun is not None:
            self._reports.append(self._report(walk, seconds))

    def _report(self, walk: Walk, seconds: float) -> ShadowReport:
        trace = walk.trace
        return ShadowReport(
            drafter=self.drafter.name,
            tokens=walk.emitted,
            steps=walk.steps,
            drafts=sum(drafted > 0 for drafted in trace.per_step_drafted),
            drafted=sum(trace.per_step_drafted),
            accepted=sum(trace.per_step_accepted),
            drafted_per_depth=trace.drafted_per_depth,
            accepted_per_depth=trace.accepted_per_depth,
            seconds=seconds,
        )
