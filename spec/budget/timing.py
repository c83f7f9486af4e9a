"""What steps took corrects the costs, and what a model has not read is part of its price."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from spec.budget.case import Case
from spec.budget.cost import StepCost
from spec.budget.members import Member
from spec.budget.mixed import branches, drafted_by, shares_of
from spec.sequence import Sequence
from spec.step import Verdict
from spec.trace import StepTrace

#: Phases of a step that do not depend on who drafted.
_OF_THE_TARGET = ("forward", "draw", "commit")
#: What was found and is likelier than this needs no model beside it.
_SURE = 0.9


class Timing:
    """Owns what each model had not read of each sequence when the step was planned."""

    def __init__(self, members: Mapping[str, Member], cost: StepCost) -> None:
        self._members, self._cost = members, cost
        self._rest: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """A step is to be planned."""
        self._rest.clear()

    def unread(self, member: Member, able: Many[Sequence], cases: Many[Case]) -> int:
        """Tokens that a model would have to catch up with, of those sequences that it might be asked to draft for."""
        together = 0
        for sequence, case in zip(able, cases, strict=True):
            if member.name in case.records:
                rest = self._rest[member.name, sequence.id] = member.rest(sequence)
                together += rest if case.found.first < _SURE else 0
        return together

    def saw(self, trace: StepTrace, verdicts: Many[Verdict]) -> None:
        """Correct the costs by a step of decoding alone."""
        context = sum(len(verdict.work.sequence.tokens) for verdict in verdicts)
        seconds = sum(spent for phase, spent in trace.seconds.items() if phase in _OF_THE_TARGET)
        trees = sum(branches(verdict.tree, verdict.work.shape) for verdict in verdicts)
        self._cost.saw(trace.rows, trace.rows / len(verdicts), context, seconds, trees)
        asked = {share.drafter for v in verdicts for share in shares_of(v.work.shape) if share.tree is None}
        if len(asked) == 1:
            self._drafted(asked.pop(), verdicts, trace.seconds.get("propose", 0.0))

    def _drafted(self, name: str, verdicts: Many[Verdict], seconds: float) -> None:
        levels, nodes = max((drafted_by(name, v.tree) for v in verdicts if v.tree is not None), default=(0, 0))
        if nodes:  # a grammar may have left nothing to draft
            rest = sum(self._rest.get((name, v.work.sequence.id), 0) for v in verdicts if _asks(name, v))
            self._members[name].cost.saw(levels, seconds, rest, max(0, nodes - levels))


def _asks(name: str, verdict: Verdict) -> bool:
    return any(share.drafter == name and share.tree is None for share in shares_of(verdict.work.shape))
