"""One step that is to be planned: all that is known when its ways of drafting are weighed, and what becomes of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spec.budget.case import SequenceStats
from spec.budget.members import OPEN, Member
from spec.budget.plan import Plan, Share, Why, shape_of
from spec.budget.weigh import NO_TREE, CandidatePlan, Estimate, weigh, weigh_pinned
from spec.price import Price
from spec.sequence import SequenceState
from spec.tree import TreeShape

#: Among how many steps catching up is shared out: whoever is taken up is likely to be of use for a while.
AHEAD = 16
#: The least share of what it brings alone that a tree is taken to bring beside others.
_LEAST_BESIDE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Planning:
    """members: the models, by name. able, cases, estimates: the sequences that may draft. seconds: of the step by its
    rows. pace: tokens in a second that time is worth. unread: tokens that each model has to catch up with."""

    members: Mapping[str, Member]
    able: Sequence[SequenceState]
    cases: Sequence[SequenceStats]
    estimates: Sequence[Estimate]
    seconds: Sequence[float]
    pace: float
    unread: Mapping[str, int]

    @classmethod
    def of(
        cls,
        members: Mapping[str, Member],
        able: Sequence[SequenceState],
        cases: Sequence[SequenceStats],
        seconds: Sequence[float],
    ) -> Planning:
        """For these sequences."""
        pairs = list(zip(able, cases, strict=True))
        estimates = [case.estimate(sequence.most_levels) for sequence, case in pairs]
        pace = sum(case.pace(seconds[1]) for case in cases)
        unread = {name: sum(of.rest(s) for s, case in pairs if name in case.models) for name, of in members.items()}
        return cls(members, able, cases, estimates, seconds, pace, unread)

    def ways(self, pinned: TreeShape | None) -> list[CandidatePlan]:
        """All that could be done, the best first. pinned: the shape of every draft, if it is given."""
        if pinned is not None:
            return weigh_pinned(self.estimates, self.seconds, self._drafting, pinned)
        return weigh(self.estimates, self.seconds, self._drafting, self.pace)

    def _drafting(self, name: str, levels: float, nodes: float) -> float:
        return self.members[name].cost.seconds(levels, max(0.0, nodes - levels) + self.unread[name] / AHEAD)

    def plans(self, why: Why, pinned: TreeShape | None) -> list[Plan]:
        """What each sequence drafts of the way that was chosen."""
        return [self._plan(index, why, pinned) for index in range(len(self.able))]

    def _plan(self, index: int, why: Why, pinned: TreeShape | None) -> Plan:
        way, case, sequence, shares = why.ways[0], self.cases[index], self.able[index], []
        found, tree = way.found[index], way.trees[index] if way.trees else NO_TREE
        case.looked, case.seconds = found > 0, way.seconds
        if found:
            best = case.found.best(found)
            shares.append(Share(best.drafter, shape_of(best), best))
        if tree.levels:
            shape = self._open(way, index) if pinned is None else pinned
            shares.append(Share(way.model, shape.limited(sequence.most_levels)))
        return Plan.of(shares, why)

    def _open(self, way: CandidatePlan, index: int) -> TreeShape:
        """A tree that grows as long as its levels and rows are worth their price."""
        member, estimate = self.members[way.model], self.estimates[index]
        # One pass drafts the level for all of them.
        level = member.cost.each / sum(tree.levels > 0 for tree in way.trees)
        # Beside others a node comes more seldom than its chance says, so time is worth as much more of these.
        pace = self.pace / max(_LEAST_BESIDE, estimate.beside) if estimate.found else self.pace
        rows = min(max(1, len(way.found) + way.nodes - round(way.trees[index].nodes)), len(self.seconds) - 1)
        levels = max(1, round(way.trees[index].levels))
        return replace(
            OPEN.limited(member.levels), price=Price.of(pace, level, self.seconds[rows : rows + OPEN.nodes], levels)
        )
