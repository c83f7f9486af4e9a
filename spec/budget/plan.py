"""What to draft for each sequence: drafters by name, how much of each, and why. Plain values:
:mod:`foresay.drafters.combined` needs nothing else to carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from foresay.spec.budget.weigh import CandidatePlan
from foresay.spec.names import NONE, together
from foresay.spec.trace import NOT_PAYING, Weighed
from foresay.spec.tree import MAX_NODES, ROOT_ONLY, DraftTree, TreeShape

#: The weight of one step among the last ones, and by how much a new leader must be ahead.
_STEP, _AHEAD = 1 / 64, 0.2


@dataclass(frozen=True, slots=True)
class Share:
    """What one drafter drafts. tree: what it proposed already, where looking up is free. first: what others found,
    which it checks and continues from."""

    drafter: str
    shape: TreeShape
    tree: DraftTree | None = None
    first: DraftTree | None = None


@dataclass(frozen=True)
class Why:
    """Why a step drafts what it does, for all its sequences. ways: the choice first, then the alternatives. looked: the
    lookups that found nodes. probe: it is explored, not the best."""

    ways: tuple[CandidatePlan, ...]
    looked: tuple[str, ...]
    probe: bool = False

    @property
    def weighed(self) -> list[Weighed]:
        """The alternatives in numbers, to display."""
        return [Weighed(self._name(way), way.nodes, way.tokens, 1000 * way.seconds) for way in self.ways]

    @cached_property
    def choice(self) -> str:
        """The drafters in use, such as ``suffix+draft_model``; ``none`` without any."""
        return self._name(self.ways[0])

    def _name(self, way: CandidatePlan) -> str:
        model, found = way.kind
        if any(way.first):
            return f"{together(self.looked)} > {model}"
        return together((*self.looked, model) if found else (model,)) or NONE

    def __str__(self) -> str:
        chosen, *others = self.weighed
        if chosen.drafter == NONE and not others:
            return "Nothing is drafted now, since no drafter has anything to propose"
        verdict = NOT_PAYING if chosen.drafter == NONE else f"Drafting with {chosen.drafter} now"
        against = f", against {' or '.join(map(str, others))}" if others else ""
        return f"{verdict}: {chosen}{against}"


class Leader:
    """The drafters in use most of the time, reported when they change and not at every step. name: "" at first. news:
    why they changed in the last step; mostly ""."""

    def __init__(self) -> None:
        self.name, self.news = "", ""
        self._shares: dict[str, float] = {}

    def see(self, why: Why) -> None:
        """Record a step's choice."""
        choice, self.news = why.choice, ""
        for name in self._shares:
            self._shares[name] *= 1 - _STEP
        self._shares[choice] = share = self._shares.get(choice, 0.0) + _STEP
        if choice != self.name and not why.probe and share > self._shares.get(self.name, 0.0) + _AHEAD:
            self.name, self.news = choice, str(why)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to draft for one sequence. shares: by drafter, and how much of each. shape: room for all shares, up to a
    tree's most nodes."""

    shares: tuple[Share, ...] = ()
    why: Why | None = None
    shape: TreeShape = ROOT_ONLY

    @classmethod
    def of(cls, shares: Sequence[Share], why: Why | None = None) -> Plan:
        """A plan with room for all of them."""
        widths, left = [], MAX_NODES - 1
        for column in zip_longest(*(share.shape.widths for share in shares), fillvalue=0):
            if width := min(sum(column), left):
                widths.append(width)
            left -= width
        return cls(tuple(shares), why, TreeShape(tuple(widths)))

    def drafts_with(self, drafter: str) -> bool:
        """Whether this drafter is called for it."""
        return any(share.drafter == drafter and share.tree is None for share in self.shares)

    @property
    def likely_levels(self) -> int:
        """Levels that are expected to be drafted."""
        return max((share.shape.likely_levels for share in self.shares), default=0)


NO_PLAN = Plan()
