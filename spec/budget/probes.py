"""Asking who is not expected to be worth it, now and then, to see whether that still holds.

What an ask is expected to lose is saved up beforehand, a small share of each step; so the dearer it is (a model that
has long rested has much to catch up with), the more seldom. And the less has come of earlier asks, the smaller the
share, and the shorter the draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many

from spec.budget.members import Member
from spec.budget.weigh import DraftSeconds, Offer, Taken

#: The share of the time that may be lost; what is left of it where hardly anything has ever come.
PROBING, _HOPELESS = 0.0075, 0.25
#: What is as likely as this to begin rightly is worth the whole share, and drafts of so many levels.
_HOPEFUL, _LEVELS = 0.3, 3


class Probes:
    """Owns what is saved up."""

    def __init__(self) -> None:
        self._saved = self._least = 0.0
        self._turn = 0

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
        self._saved += max((_share(member, best, offers) for member in models), default=0.0) * best.seconds
        if self._saved < self._least:
            return best
        self._least = math.inf
        for member in sorted(models, key=lambda member: member.asked):
            ways = _trees if member.name == best.model else _chains
            if pinned and ways is _trees:
                continue
            self._turn += ways is _trees
            for way in ways(member, best, offers, drafting, seconds, self._turn):
                loss = max(0.0, way.seconds - way.tokens / best.pace)
                if loss <= self._saved:
                    # What more was saved, for one that had much to catch up with, is not for many that have not.
                    self._saved = self._least = 0.0
                    return way
                self._least = min(self._least, loss)
        if self._least == math.inf:  # all take part already
            self._least = 0.0
        self._saved = min(self._saved, self._least)
        return best


def _chains(
    member: Member, best: Taken, offers: Many[Offer], drafting: DraftSeconds, seconds: Many[float], turn: int
) -> Iterator[Taken]:
    """A few levels beside what is taken anyway. Of what they bring nothing is expected."""
    most = _LEVELS if _hope(member, offers) == 1.0 else 1
    levels = tuple(min(most, len(offer.models.get(member.name, ()))) for offer in offers)
    if any(levels):
        rows = len(offers) + best.nodes + sum(levels)
        spent = best.seconds - _of_rows(seconds, len(offers) + best.nodes) + _of_rows(seconds, rows)
        spent += drafting(member.name, max(levels), max(levels))
        yield Taken(member.name, best.found, levels, best.tokens, spent)


def _trees(
    member: Member, best: Taken, offers: Many[Offer], drafting: DraftSeconds, seconds: Many[float], turn: int
) -> Iterator[Taken]:
    """For one that drafts chains, one of its trees instead, in turns. It is expected to bring what the chain does."""
    if best.tree is not None or not member.bushes:
        return
    shape = member.bushes[turn % len(member.bushes)].shape
    levels = tuple(shape.levels if shape in offer.trees.get(member.name, ()) else 0 for offer in offers)
    if any(levels):
        rows = len(offers) + sum(best.found) + (shape.nodes - 1) * sum(map(bool, levels))
        spent = _of_rows(seconds, rows) + drafting(member.name, shape.levels, shape.nodes - 1)
        yield Taken(member.name, best.found, levels, best.tokens, spent, shape)


def _share(member: Member, best: Taken, offers: Many[Offer]) -> float:
    """Of the time, that may be lost by asking a member. What it has to catch up with grows at each step: a share that
    does not go beyond that would never be enough."""
    if member.name == best.model:
        return PROBING
    return min(PROBING, PROBING * _hope(member, offers) + member.cost.of_a_token / best.seconds)


def _hope(member: Member, offers: Many[Offer]) -> float:
    """Of a member, by what its chains begin with."""
    first = max((offer.models[member.name][0] for offer in offers if offer.models.get(member.name)), default=0.0)
    return min(1.0, max(_HOPELESS, first / _HOPEFUL))


def _of_rows(seconds: Many[float], rows: int) -> float:
    return seconds[min(rows, len(seconds) - 1)]
