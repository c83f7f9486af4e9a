"""What steps took corrects the costs, and what a model has not read is part of its price."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

from spec.budget.case import Case
from spec.budget.cost import StepCost
from spec.budget.members import Member
from spec.budget.mixed import branches, drafted_by, to_draft
from spec.budget.ways import Taken
from spec.sequence import Sequence
from spec.step import Verdict
from spec.trace import StepTrace

#: Phases of a step that do not depend on who drafted.
_OF_THE_TARGET = ("forward", "draw", "commit")
#: What was found and is likelier than this needs no model beside it.
_SURE = 0.9
#: Among how many steps at most catching up is shared out, how many there are between two copied passages before
#: anybody knows, and how far one passage moves that.
_AHEAD, _STRETCH, _STRETCHED = 32, 16.0, 0.1


class Prices:
    """Seconds of a model's draft in the step that is planned: by its name, levels and nodes.

    Catching up is an outlay: whoever is taken up is likely to be of use for as many steps as there mostly are between
    two passages that are copied, or have been by now. So for weighing it is shared out among those; the step itself
    takes it whole.

    unread: tokens that each model must catch up with; share: how many of these are this step's.
    """

    def __init__(self, members: Mapping[str, Member], unread: Mapping[str, int], share: Mapping[str, float]) -> None:
        self._members, self._unread, self._share = members, unread, share

    def shared(self, name: str, levels: float, nodes: float, grown: bool = False) -> float:
        """With this step's share of catching up."""
        return self._members[name].cost.seconds(levels, self._share[name], nodes - levels, grown)

    def whole(self, name: str, levels: float, nodes: float, grown: bool = False) -> float:
        """With all of it."""
        return self._members[name].cost.seconds(levels, self._unread[name], nodes - levels, grown)

    def paid(self, way: Taken) -> Taken:
        """A way that was weighed, with what its step really takes."""
        if not way.model or self._unread[way.model] <= self._share[way.model]:
            return way
        left = self._unread[way.model] - self._share[way.model]
        return replace(way, seconds=way.seconds + left * self._members[way.model].cost.of_a_token)


class Timing:
    """Owns what each model had not read of each sequence when the step was planned."""

    def __init__(self, members: Mapping[str, Member], cost: StepCost) -> None:
        self._members, self._cost = members, cost
        self._rest: dict[tuple[str, str], int] = {}
        self._stretch = _STRETCH

    def stretched(self, steps: int) -> None:
        """So many steps came between two passages that are copied."""
        self._stretch += _STRETCHED * (min(steps, _AHEAD) - self._stretch)

    def lasted(self, steps: int) -> None:
        """So many came before the text ended: it says something if it was more than there mostly are."""
        if steps > self._stretch:
            self.stretched(steps)

    def prices(self, models: Many[Member], able: Many[Sequence], cases: Many[Case]) -> Prices:
        """Of these models, in the step that is to be planned."""
        self._rest.clear()
        unread, shares = {}, {}
        for member in models:
            tokens, share = 0, 0.0
            for sequence, case in zip(able, cases, strict=True):
                if member.name in case.records:
                    rest = self._rest[member.name, sequence.id] = member.rest(sequence)
                    if case.found.first < _SURE:
                        tokens += rest
                        ahead = min(max(case.alone, self._stretch), _AHEAD, sequence.limit - len(sequence.tokens))
                        share += rest / max(1.0, ahead)
            unread[member.name], shares[member.name] = tokens, share
        return Prices(self._members, unread, shares)

    def saw(self, trace: StepTrace, verdicts: Many[Verdict]) -> None:
        """Correct the costs by a step of decoding alone."""
        context = sum(len(verdict.work.sequence.tokens) for verdict in verdicts)
        seconds = sum(spent for phase, spent in trace.seconds.items() if phase in _OF_THE_TARGET)
        trees = sum(branches(verdict.tree, verdict.work.shape) for verdict in verdicts)
        self._cost.saw(trace.rows, trace.rows / len(verdicts), context, seconds, trees)
        for member in self._members.values():
            member.cost.slower = self._cost.slower
        asked = [share for verdict in verdicts for share in to_draft(verdict.work.shape)]
        if len({share.drafter for share in asked}) == 1:
            grown = any(share.shape.price is not None for share in asked)
            self._drafted(asked[0].drafter, verdicts, trace.seconds.get("propose", 0.0), grown)

    def _drafted(self, name: str, verdicts: Many[Verdict], seconds: float, grown: bool) -> None:
        levels, nodes = max((drafted_by(name, v.tree) for v in verdicts if v.tree is not None), default=(0, 0))
        if nodes:  # a grammar may have left nothing to draft
            rest = sum(self._rest.get((name, v.work.sequence.id), 0) for v in verdicts if _asks(name, v))
            more = 0 if grown else max(0, nodes - levels)
            self._members[name].cost.saw(levels, seconds, rest, more, grown)


def _asks(name: str, verdict: Verdict) -> bool:
    return any(share.drafter == name for share in to_draft(verdict.work.shape))
