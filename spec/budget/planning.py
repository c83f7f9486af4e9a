"""One step that is to be planned: all that is known when its ways of drafting are weighed, and what becomes of one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from spec.budget.case import Case
from spec.budget.members import OPEN, Member
from spec.budget.mixed import Mixed, Share, Why, shape_of
from spec.budget.weigh import NO_TREE, Offer, Taken, weigh, weigh_pinned
from spec.price import Price
from spec.sequence import Sequence
from spec.tree import TreeShape

#: Among how many steps catching up is shared out: whoever is taken up is likely to be of use for a while.
_AHEAD = 16
#: The least share of what it brings alone that a tree is taken to bring beside others.
_LEAST_BESIDE = 0.05


@dataclass(slots=True, eq=False)
class Planning:
    """members: the models, by name. able, cases, offers: the sequences that may draft. seconds: of the step by its
    rows. pace: tokens in a second that time is worth. unread: tokens that each model has to catch up with; shared: how
    many of these are this step's, since catching up is an outlay for the steps that follow."""

    members: Mapping[str, Member]
    able: Many[Sequence]
    cases: Many[Case]
    offers: Many[Offer]
    seconds: Many[float]
    pace: float
    unread: dict[str, int]
    shared: dict[str, float]

    @classmethod
    def of(
        cls, members: Mapping[str, Member], able: Many[Sequence], cases: Many[Case], seconds: Many[float]
    ) -> Planning:
        """For these sequences."""
        offers = [case.offer(sequence.most_levels) for sequence, case in zip(able, cases, strict=True)]
        pace = sum(case.pace(seconds[1]) for case in cases)
        planning = cls(members, able, cases, offers, seconds, pace, {}, {})
        for name, member in members.items():
            for sequence, case in zip(able, cases, strict=True):
                if name in case.models:
                    planning._read(name, member.rest(sequence), sequence.limit - len(sequence.tokens))
        return planning

    def _read(self, name: str, tokens: int, left: int) -> None:
        self.unread[name] = self.unread.get(name, 0) + tokens
        self.shared[name] = self.shared.get(name, 0.0) + tokens / max(1, min(_AHEAD, left))

    def ways(self, pinned: TreeShape | None) -> list[Taken]:
        """All that could be done, the best first. pinned: the shape of every draft, if it is given."""
        if pinned is not None:
            return weigh_pinned(self.offers, self.seconds, self._drafting, pinned)
        return weigh(self.offers, self.seconds, self._drafting, self.pace)

    def _drafting(self, name: str, levels: float, nodes: float) -> float:
        return self.members[name].cost.seconds(levels, max(0.0, nodes - levels) + self.shared[name])

    def reading(self, name: str, tokens: float) -> float:
        """Seconds that so many tokens more take a model to catch up with."""
        return self.members[name].cost.slower * self.members[name].cost.token * tokens

    def catching_up(self, name: str) -> float:
        """Seconds of catching up that are not this step's share."""
        return self.reading(name, self.unread[name] - self.shared[name])

    def shapes(self, why: Why, pinned: TreeShape | None) -> list[Mixed]:
        """What each sequence drafts of the way that was chosen."""
        return [self._shape(index, why, pinned) for index in range(len(self.able))]

    def _shape(self, index: int, why: Why, pinned: TreeShape | None) -> Mixed:
        way, case, sequence, shares = why.ways[0], self.cases[index], self.able[index], []
        found, tree = way.found[index], way.trees[index] if way.trees else NO_TREE
        case.looked, case.seconds = found > 0, way.seconds
        if found:
            best = case.found.best(found)
            shares.append(Share(best.drafter, shape_of(best), best))
        if tree.levels:
            shape = self._open(way, index) if pinned is None else pinned
            shares.append(Share(way.model, shape.limited(sequence.most_levels)))
        return Mixed.sharing(shares, why)

    def _open(self, way: Taken, index: int) -> TreeShape:
        """A tree that grows as long as its levels and rows are worth their price."""
        member = self.members[way.model]
        # One pass drafts the level for all of them.
        level = member.cost.slower * member.cost.level / sum(tree.levels > 0 for tree in way.trees)
        # Beside others a node comes more seldom than its chance says, so time is worth as much more of these.
        beside = max(_LEAST_BESIDE, self.offers[index].beside[way.model]) if self.offers[index].found else 1.0
        rows = min(max(1, len(way.found) + way.nodes - round(way.trees[index].nodes)), len(self.seconds) - 1)
        levels = max(1, round(way.trees[index].levels))
        price = Price.of(self.pace / beside, level, self.seconds[rows : rows + OPEN.nodes], levels)
        return replace(OPEN.limited(member.levels), price=price)
