"""What to draft for each sequence: drafters by name, how much of each, and why. Plain values:
:mod:`foresay.drafters.combined` needs nothing else to carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from foresay.spec.budget.weigh import DraftOption
from foresay.spec.names import NONE, together
from foresay.spec.trace import NOT_PAYING
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

    ways: tuple[DraftOption, ...]
    looked: tuple[str, ...]
    probe: bool = False

    @cached_property
    def choice(self) -> str:
        """The drafters in use, such as ``suffix+draft_model``; ``none`` without any."""
        return self._name(self.ways[0])

    def _name(self, way: DraftOption) -> str:
        if any(way.first):
            return f"{together(self.looked)} > {way.model}"
        return together((*self.looked * any(way.found), *filter(None, [way.model]))) or NONE

    def _figures(self, way: DraftOption) -> str:
        name = self._name(way)
        what = "without drafts" if name == NONE else f"with {way.nodes} drafted by {name}"
        return f"{way.tokens:.2f} tokens in {1000 * way.seconds:.2f} ms {what}"

    def __str__(self) -> str:
        chosen, *others = map(self._figures, self.ways)
        if self.choice == NONE and not others:
            return "Nothing is drafted now, since no drafter has anything to propose"
        verdict = NOT_PAYING if self.choice == NONE else f"Drafting with {self.choice} now"
        return f"{verdict}: {chosen}{', against ' if others else ''}{' or '.join(others)}"


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
