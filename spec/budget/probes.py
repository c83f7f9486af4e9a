"""Asking who is not expected to be worth it, now and then, to see whether that still holds.

What an ask is expected to lose is saved up beforehand, a small share of each step; so the dearer it is (a model that
has long rested has much to catch up with), the more seldom. And the less has come of earlier asks, the smaller the
share, and the shorter the draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from spec.budget.members import Member
from spec.budget.weigh import DraftSeconds, Offer, Taken

#: The share of the time that may be lost; what is left of it where hardly anything has ever come.
PROBING, _HOPELESS = 0.0075, 0.25
#: The least that an ask is taken to lose, as a share of the step: however cheap, it is no way of its own.
_LEAST_LOSS = 0.1
#: What is as likely as this to begin rightly is worth the whole share, and drafts of so many levels.
_HOPEFUL, _LEVELS = 0.3, 3


class Probes:
    """Owns what is saved up, for each member by its name."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def due(
        self,
        models: Many[Member],
        best: Taken,
        offers: Many[Offer],
        drafting: DraftSeconds,
        seconds: Many[float],
        pinned: bool,
    ) -> Taken:
        """What to do in the place of the best way, if enough is saved up for anything; otherwise that.

        drafting: seconds of a draft; seconds: of a step by its rows; pinned: whether shapes may not be chosen.
        """
        for member in models:
            saved = self._saved.get(member.name, 0.0)
            self._saved[member.name] = saved + _share(member, best, offers) * best.seconds
        for member in sorted(models, key=lambda member: member.asked):
            if member.name != best.model:
                way = _chain(member, best, offers, drafting, seconds)
            elif not pinned:
                way = _tree(member, best, offers, drafting, seconds, self._turns.get(member.name, 0))
            else:
                continue
            if way is not None and self._affords(member, way, best):
                return way
        return best

    def surprised(self, name: str) -> None:
        """A member at rest was right: it is asked again at once, as long as it is."""
        self._saved[name] = math.inf

    def _affords(self, member: Member, way: Taken, best: Taken) -> bool:
        """Whether enough is saved; then it is spent. No more is saved up than this takes: what was meant for a long
        text to catch up with is not for many asks in a short one."""
        loss = max(_LEAST_LOSS * best.seconds, way.seconds - way.tokens / best.pace)
        if self._saved[member.name] < loss:
            return False
        self._saved[member.name] = 0.0
        self._turns[member.name] = self._turns.get(member.name, 0) + 1
        return True


def _chain(
    member: Member, best: Taken, offers: Many[Offer], drafting: DraftSeconds, seconds: Many[float]
) -> Taken | None:
    """A few levels beside what is taken anyway. Of what they bring nothing is expected."""
    most = _LEVELS if _hope(member, offers) == 1.0 else 1
    levels = tuple(min(most, len(offer.models.get(member.name, ()))) for offer in offers)
    if not any(levels):
        return None
    rows = len(offers) + best.nodes + sum(levels)
    spent = best.seconds - _of_rows(seconds, len(offers) + best.nodes) + _of_rows(seconds, rows)
    spent += drafting(member.name, max(levels), max(levels))
    return Taken(member.name, best.found, levels, best.tokens, spent)


def _tree(
    member: Member, best: Taken, offers: Many[Offer], drafting: DraftSeconds, seconds: Many[float], turn: int
) -> Taken | None:
    """For one that is asked anyway, another of its trees, in turns. It is expected to bring what is brought now."""
    others = [bush.shape for bush in member.bushes if bush.shape is not best.tree]
    if not others:
        return None
    shape = others[turn % len(others)]
    levels = tuple(shape.levels if shape in offer.trees.get(member.name, ()) else 0 for offer in offers)
    if not any(levels):
        return None
    rows = len(offers) + sum(best.found) + (shape.nodes - 1) * sum(map(bool, levels))
    spent = _of_rows(seconds, rows) + drafting(member.name, shape.levels, shape.nodes - 1)
    return Taken(member.name, best.found, levels, best.tokens, spent, shape)


def _share(member: Member, best: Taken, offers: Many[Offer]) -> float:
    """Of the time, that may be lost by asking a member. What it has to catch up with grows with each token: a share
    that does not go beyond that would never be enough."""
    if member.name == best.model:
        return PROBING
    reading = member.cost.of_a_token * best.tokens / len(offers)
    return min(PROBING, PROBING * _hope(member, offers) + reading / best.seconds)


def _hope(member: Member, offers: Many[Offer]) -> float:
    """Of a member, by what its chains begin with."""
    first = max((offer.models[member.name][0] for offer in offers if offer.models.get(member.name)), default=0.0)
    return min(1.0, max(_HOPELESS, first / _HOPEFUL))


def _of_rows(seconds: Many[float], rows: int) -> float:
    return seconds[min(rows, len(seconds) - 1)]
