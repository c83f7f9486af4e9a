"""Asking who is not expected to be worth it, now and then, to see whether that still holds.

What an ask is expected to lose is saved up beforehand, a small share of each step; so the dearer it is (a model that
has long rested has much to catch up with), the more seldom. And the less has come of earlier asks, the smaller the
share, and the shorter the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from spec.budget.members import Member
from spec.budget.ways import DraftSeconds, Offer, Taken, of_rows
from spec.tree import TreeShape

#: The share of the time that may be lost; what is left of it where hardly anything has ever come.
PROBING, _HOPELESS = 0.003, 0.25
#: The least that an ask is taken to lose, as a share of the step: however cheap, it is no way of its own.
_LEAST_LOSS = 0.1
#: Where too little was saved, the price, which grows meanwhile, is looked at again when there is that much, and so many
#: times what there is.
_MORE = 1.25
#: What is as likely as this to begin rightly is worth the whole share, and drafts of so many levels.
_HOPEFUL, _LEVELS = 0.3, 3


class Probes:
    """Owns what is saved up, for each member by its name."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}
        self._least: dict[str, float] = {}
        self._again: set[str] = set()

    def save(self, allowed: Mapping[str, float]) -> bool:
        """A step more; returns whether anybody may be due. allowed: see :func:`allowances`."""
        due = False
        for name, seconds in allowed.items():
            self._saved[name] = self._saved.get(name, 0.0) + seconds
            due = due or self._may_ask(name)
        return due

    def due(
        self,
        models: Many[Member],
        best: Taken,
        offers: Many[Offer],
        drafting: DraftSeconds,
        seconds: Many[float],
        pinned: TreeShape | None,
    ) -> Taken:
        """What to do in the place of the best way, if enough is saved up for anything; otherwise that.

        drafting: seconds of a draft; seconds: of a step by its rows; pinned: the shape of all drafts, if there is one.
        """
        for member in sorted(models, key=lambda member: member.asked):
            if not self._may_ask(member.name):
                continue
            way = None
            if member.name != best.model:
                way = _chain(member, best, offers, drafting, seconds, pinned)
            if way is None:
                self._again.discard(member.name)
                self._least[member.name] = self._saved.get(member.name, 0.0) + _LEAST_LOSS * best.seconds
            elif self._affords(member.name, way, best):
                return way
        return best

    def surprised(self, name: str) -> None:
        """A member at rest was right: it is asked again in the next step, unless that takes longer than a step more."""
        self._again.add(name)

    def ended(self) -> None:
        """A sequence is over: what was surprising in it may not be in another."""
        self._again.clear()
        self._least.clear()

    def _may_ask(self, name: str) -> bool:
        """Whether it was right just now, or more is saved than was too little the last time."""
        return self._saved.get(name, 0.0) >= self._least.get(name, 0.0) or name in self._again

    def _affords(self, name: str, way: Taken, best: Taken) -> bool:
        """Whether it is to be asked; then what is saved is spent, all of it: what was meant for a long text to catch up
        with is not for many asks in a short one."""
        loss = max(_LEAST_LOSS * best.seconds, way.seconds - way.tokens / best.pace)
        again = name in self._again and name != best.model and loss <= best.seconds
        self._again.discard(name)
        if self._saved[name] < loss and not again:
            self._least[name] = max(loss, _MORE * self._saved[name])
            return False
        self._saved[name] = self._least[name] = 0.0
        return True


def _chain(
    member: Member,
    best: Taken,
    offers: Many[Offer],
    drafting: DraftSeconds,
    seconds: Many[float],
    pinned: TreeShape | None,
) -> Taken | None:
    """A few levels beside what was found, or the pinned shape; nobody else is asked. Of what they bring nothing is
    expected."""
    most = pinned.levels if pinned is not None else _LEVELS if _hope(member, offers) == 1.0 else 1
    levels = tuple(min(most, len(offer.models.get(member.name, ()))) for offer in offers)
    if not any(levels):
        return None
    found = best.found if pinned is None else (0,) * len(offers)
    nodes = sum(levels) if pinned is None else (pinned.nodes - 1) * sum(map(bool, levels))
    tokens = len(offers) + sum(sum(offer.found[:taken]) for offer, taken in zip(offers, found, strict=True))
    spent = of_rows(seconds, len(offers) + sum(found) + nodes) + drafting(member.name, max(levels), max(levels))
    return Taken(member.name, found, levels, tokens, spent)


def allowances(models: Many[Member], best: Taken, offers: Many[Offer]) -> dict[str, float]:
    """Seconds of a step that may be lost by asking each model that has anything to say."""
    others = [member for member in models if member.name != best.model]
    asked = [member for member in others if any(offer.models.get(member.name) for offer in offers)]
    return {member.name: best.seconds * _share(member, best, offers) / len(asked) for member in asked}


def _share(member: Member, best: Taken, offers: Many[Offer]) -> float:
    """Of the time, that may be lost by asking a member if it is the only one.

    What it has to catch up with grows with each token, so that is paid beside, up to as much again.
    """
    reading = member.cost.of_a_token * best.tokens / len(offers)
    return PROBING * _hope(member, offers) + min(PROBING, reading / best.seconds)


def _hope(member: Member, offers: Many[Offer]) -> float:
    """Of a member, by what its chains begin with."""
    first = max((offer.models[member.name][0] for offer in offers if offer.models.get(member.name)), default=0.0)
    return min(1.0, max(_HOPELESS, first / _HOPEFUL))
