"""A drafter that runs in the shadow of the one in use, unverified: what would have been accepted if it had drafted.

A text does not depend on its drafter (promise 1), and a lookup drafter needs only the text. So its steps can be
replayed
exactly: at each root it proposes, the text says what is accepted, and the next root is one past that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from foresay.spec.observer import Observer
from foresay.spec.protocols import Drafter
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SequenceTrace, ShadowReport, StepTrace
from foresay.spec.tree import DraftTree, TreeShape


class Walk:
    """One sequence replayed with another drafter, some tokens after the real one.

    sequence: the real one. The drafter only gets a copy, from the prompt on, since the sequence itself may be ahead of
    the walk. shape: requested in each step. trace: the steps so far. begun: tokens, including the prompt, before the
    first of them; None until :meth:`begin`.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape, sequence: SequenceState) -> None:
        self.trace = SequenceTrace()
        self.begun: int | None = None
        self._drafter, self._shape = drafter, shape
        # The output of an earlier engine counts as prompt here.
        begin = sequence.prompt_length + sequence.resumed_at
        self._copy = replace(sequence, tokens=sequence.tokens[:begin], prompt_length=begin)
        self._tree: DraftTree | None = None

    def read(self) -> None:
        """A chunk of the prompt was computed."""
        self._drafter.extend(self._copy)

    def begin(self, first: Sequence[int]) -> None:
        """The prompt is computed. first: the output tokens emitted with it, which no drafter drafts."""
        self._copy.tokens.extend(first)
        self.begun = self.length

    @property
    def length(self) -> int:
        """Tokens emitted by its steps so far, including the prompt."""
        return len(self._copy.tokens)

    @property
    def emitted(self) -> int:
        """Tokens of the output so far, including those emitted with the prompt."""
        return self.length - self._copy.prompt_length

    @property
    def steps(self) -> int:
        """Steps so far, including the one that computed the prompt, if it emitted anything."""
        with_prompt = self.begun is not None and self.begun > self._copy.prompt_length
        return len(self.trace.per_step_drafted) + with_prompt

    def follow(self, tokens: Sequence[int], over: bool = False) -> None:
        """Take all steps that ``tokens`` (the prompt and the output known so far) determine. over: no more tokens will
        follow."""
        copy = self._copy
        while self.length < len(tokens):
            tree = self._tree = self._tree or self._proposed()
            known = tokens[self.length : self.length + max(tree.depths) + 1]
            if len(known) <= max(tree.depths) and not over:
                return
            accepted = tree.accepted(known)
            emitted = known[: accepted + 1]
            self.trace.record(tree.depths[1:], accepted, len(emitted))
            copy.tokens.extend(emitted)
            self._tree = None

    def cut(self, length: int) -> None:
        """The text ended at its token number ``length``, including the prompt: steps may have gone past that."""
        surplus = self.length - length
        if surplus > 0:
            self.trace.cut(surplus)
            del self._copy.tokens[length:]

    def close(self) -> None:
        """The text is complete: drop the drafter's state of the sequence."""
        self._copy.finish_reason = self._copy.finish_reason or "stop"
        self._drafter.finished(self._copy)

    def _proposed(self) -> DraftTree:
        """The tree at this root, at most as deep as could be emitted."""
        shape = self._shape.limited(self._copy.most_levels)
        if not shape.levels:
            return DraftTree.chain([self._copy.tokens[-1]])
        return self._drafter.propose([self._copy], [shape])[0]


#: If reports are never collected, only this many of the last are kept.
_MOST_REPORTS = 1024


class Shadow(Observer):
    """Replays every sequence that may speculate and has no grammar (which would prune drafts and force others).
    drafter: one that needs neither a model nor the target's features.

    It drafts after the tokens of a step were sent, and only from committed text, so it can only affect the time of the
    next step.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        assert drafter.needs is None, "a shadow is not shown the target's features"
        self.drafter, self.shape = drafter, shape
        self._walks: dict[str, Walk] = {}
        self._seconds: dict[str, float] = {}
        self._reports: deque[ShadowReport] = deque(maxlen=_MOST_REPORTS)

    def reports(self) -> list[ShadowReport]:
        """Reports of the requests that ended since the last call, at most the last thousand or so."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Take the steps that the new tokens determine."""
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
            # The step that computes the prompt drafts nothing, with any drafter.
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
