"""The drafter and the nodes that bring most tokens for the time they take, of all that could be asked for in a step.

A step of S sequences with n drafted nodes emits S tokens and those of the drafted that are accepted; each node adds its
chance. So, for one way of drafting, the likeliest nodes of all sequences are taken as long as the next one is worth its
row. A node is never likelier than its parent, so what is taken is a tree.

What time is worth is the pace at which tokens came lately. Where they come in bursts (a text that is copied with edits)
a step between two bursts should be short, rather than buy dearly what the next burst brings for nothing; taking the
best tokens per second of each step alone was up to 13 % slower there (docs/budget.md). Where nothing changes, both
agree.

::

    found    nodes that looking up the text has brought already, with their chances
    drafted  what a model would draft, level by level: known by its chances alone, and paid for by the level
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter

from spec.budget.ways import DraftSeconds, Offer, Taken, of_rows
from spec.tree import MAX_NODES

#: Tokens that drafting must bring more than none: chances are only estimates, and the best looks better than it is. Of
#: models, whose drafts take time of their own, more.
EDGE, MODEL_EDGE = 0.02, 0.05
#: A model is out of the question that brings so many tokens less than nothing, of each sequence, time counted in.
_FAR = 0.03
#: Levels below one that brings so little are not looked at.
_NOTHING = 0.005
#: A model is asked for no more levels once one more is worth so many tokens less than the best of fewer.
_FALLEN = 0.05


def weigh(
    offers: Many[Offer],
    seconds: Many[float],
    draft_seconds: DraftSeconds,
    pace: float,
    most: int = MAX_NODES - 1,
    branching: float = 0.0,
) -> list[Taken]:
    """The best of each way of drafting, the choice first, no draft always among them.

    seconds: of a step by its rows; no more rows than it knows are taken. pace: tokens in a second that time is worth.
    most: drafted nodes of each sequence. branching: seconds that a tree takes more than a chain of as many nodes.
    """
    scale = _Scale(seconds, pace, most, branching)
    ways = weigh_found(offers, seconds, pace, most)
    looked, least = any(offer.found for offer in offers), max(worth(way, pace) for way in ways)
    for model in {name: None for offer in offers for name in offer.models}:
        for beside in (False, True) if looked else (False,):
            drafted = scale.tree(offers, model, beside, draft_seconds)
            if not any(worth(way, pace) > least for way in drafted):  # a tree as large as they were; less may pay
                drafted += scale.deepest(offers, model, beside, draft_seconds)
            if not (drafted or beside):  # to tell what it was preferred to
                drafted.append(scale.best(offers, model, 1, False, draft_seconds(model, 1, 1)))
            ways += drafted
    kinds: dict[tuple[str, bool], tuple[float, Taken]] = {}
    for way in ways:
        kind, value = way.kind, worth(way, pace)
        if kind not in kinds or value > kinds[kind][0]:
            kinds[kind] = value, way
    return [way for _, way in sorted(kinds.values(), key=lambda kind: -kind[0])]


def weigh_found(offers: Many[Offer], seconds: Many[float], pace: float, most: int = MAX_NODES - 1) -> list[Taken]:
    """The same of what was found alone: the best of it, and no draft."""
    none = (0,) * len(offers)
    plain = Taken("", none, none, float(len(offers)), seconds[len(offers)])
    if not any(offer.found for offer in offers):
        return [plain]
    found = _Scale(seconds, pace, most, 0.0).best(offers, "", 0, True, 0.0)
    if not found.nodes:
        return [plain]
    return [found, plain] if worth(found, pace) > worth(plain, pace) else [plain, found]


def pays_up_to(offers: Many[Offer], seconds: Many[float], draft_seconds: DraftSeconds) -> float:
    """The pace above which no model's draft, alone, is worth its time, or beside what is found, where it brings less.

    By a margin: it is out of the question then.
    """
    plain, most = len(offers), 0.0
    edge = plain * (MODEL_EDGE - _FAR)
    for model in {name: None for offer in offers for name in offer.models}:
        gain, rows = -edge, plain
        for levels, column in enumerate(zip_longest(*(offer.models.get(model, ()) for offer in offers)), start=1):
            chances = [chance for chance in column if chance]
            if sum(chances) < _NOTHING:
                break
            gain, rows = gain + sum(chances), rows + len(chances)
            spent = of_rows(seconds, rows) - seconds[plain] + draft_seconds(model, levels, levels)
            most = max(most, gain / spent) if spent > 0 else math.inf
        trees = [offer.tree(model, False) for offer in offers]
        if any(tree.tokens for tree in trees):
            deepest = max(tree.levels for tree in trees)
            spent = draft_seconds(model, deepest, deepest, grown=True)
            spent += of_rows(seconds, plain + round(sum(tree.nodes for tree in trees))) - seconds[plain]
            most = max(most, (sum(tree.tokens for tree in trees) - edge) / spent) if spent > 0 else math.inf
    return most


def worth(way: Taken, pace: float) -> float:
    """Its tokens, time counted in, without what each sequence must be brought more than by none."""
    edge = MODEL_EDGE if way.model else EDGE if way.nodes else 0.0
    return way.value(pace) - len(way.found) * edge


def weigh_pinned(
    offers: Many[Offer], seconds: Many[float], draft_seconds: DraftSeconds, levels: int, nodes: int
) -> list[Taken]:
    """The same where the shape is given: only who drafts it is chosen, and somebody does who has anything to say."""
    none, count = (0,) * len(offers), len(offers)
    found = tuple(min(len(offer.found), nodes) for offer in offers)
    ways = []
    if any(found):
        brought = sum(sum(offer.found[:taken]) for offer, taken in zip(offers, found, strict=True))
        ways.append(Taken("", found, none, count + brought, of_rows(seconds, count + sum(found))))
    for model in {name: None for offer in offers for name in offer.models}:
        chains = [offer.models.get(model, ())[:levels] for offer in offers]
        taken = of_rows(seconds, count + nodes * sum(map(bool, chains))) + draft_seconds(model, levels, nodes)
        ways.append(Taken(model, none, tuple(map(len, chains)), count + sum(map(sum, chains)), taken))
    ways.sort(key=lambda way: -way.pace)
    return [*ways, Taken("", none, none, float(count), seconds[count])]


def worth_rows(chances: Many[float], seconds: Many[float], rows: int, pace: float) -> tuple[int, float]:
    """How many nodes of these chances, likeliest first, are worth their rows beside ``rows`` others, and the tokens
    expected of them."""
    count, value, best, tokens = 0, 0.0, 0.0, 0.0
    plain = seconds[rows]
    for taken, chance in enumerate(chances[: len(seconds) - rows - 1], start=1):
        value += chance
        gain = value - pace * (seconds[rows + taken] - plain)
        if gain > best:
            best, count, tokens = gain, taken, value
    return count, tokens


@dataclass(frozen=True, slots=True)
class _Scale:
    """What nodes are weighed with: see :func:`weigh`."""

    seconds: Many[float]
    pace: float
    most: int
    branching: float

    def _may_pay(self, offers: Many[Offer], model: str, looked: bool, draft_seconds: DraftSeconds) -> bool:
        """Whether a model's chain would be worth the time of its draft if verifying it took none."""
        columns = zip_longest(*(offer.chain(model, looked) for offer in offers), fillvalue=0.0)
        gain, best = 0.0, -math.inf
        for levels, column in enumerate(columns, start=1):
            gain += sum(column)
            value = gain - self.pace * draft_seconds(model, levels, levels)
            if value > 0:
                return True
            if value < best:  # each level brings less than the one before
                break
            best = value
        return False

    def deepest(self, offers: Many[Offer], model: str, beside: bool, draft_seconds: DraftSeconds) -> list[Taken]:
        """The best size at each depth of a model, until going deeper does not pay; none if that cannot be."""
        ways: list[Taken] = []
        if not self._may_pay(offers, model, beside, draft_seconds):
            return ways
        best = -math.inf
        for levels in range(1, max(len(offer.models.get(model, ())) for offer in offers) + 1):
            way = self.best(offers, model, levels, beside, draft_seconds(model, levels, levels))
            ways.append(way)
            value = way.value(self.pace)
            if value < best - _FALLEN:
                break
            best = max(best, value)
        return ways

    def tree(self, offers: Many[Offer], model: str, looked: bool, draft_seconds: DraftSeconds) -> list[Taken]:
        """A tree for each sequence that may have one, beside the best of what was found, or alone; none if its draft
        alone takes longer than it is worth."""
        trees = tuple(offer.tree(model, looked) for offer in offers)
        gain, rows = sum(grove.tokens for grove in trees), round(sum(grove.nodes for grove in trees))
        deepest = max(grove.levels for grove in trees)
        drafting = draft_seconds(model, deepest, deepest, grown=True)
        if not gain or gain <= self.pace * drafting:
            return []
        beyond = self.seconds[min(rows, len(self.seconds) - len(offers) - 1) :]
        if looked:
            found = _Scale(beyond, self.pace, self.most, 0.0).best(offers, "", 0, True, drafting)
        else:
            found = Taken("", (0,) * len(offers), (), float(len(offers)), beyond[len(offers)] + drafting)
        spent = found.seconds + self.branching * sum(grove.branches for grove in trees if grove.tokens)
        levels = tuple(max(1, round(grove.levels)) if grove.tokens else 0 for grove in trees)
        return [Taken(model, found.found, levels, found.tokens + gain, spent, trees)]

    def best(self, offers: Many[Offer], model: str, levels: int, looked: bool, drafting: float) -> Taken:
        """The likeliest nodes of all sequences, as many as are worth most. looked: whether found ones take part."""
        rows = len(offers)
        if rows == 1 and not levels:
            (offer,) = offers
            count, value = worth_rows(offer.found[: self.most] if looked else (), self.seconds, rows, self.pace)
            return Taken(model, (count,), (0,), rows + value, self.seconds[rows + count] + drafting)
        pool = self._pool(offers, model, levels, looked)
        count, _ = worth_rows([chance for chance, _, _ in pool], self.seconds, rows, self.pace)
        counts, tokens = ([0] * rows, [0] * rows), float(rows)
        for chance, index, modelled in pool[:count]:
            if counts[0][index] + counts[1][index] < self.most:
                counts[modelled][index] += 1
                tokens += chance
        spent = self.seconds[rows + sum(map(sum, counts))] + drafting
        spent += self.branching * sum(bool(found and modelled) for found, modelled in zip(*counts, strict=True))
        return Taken(model, tuple(counts[0]), tuple(counts[1]), tokens, spent)

    @staticmethod
    def _pool(offers: Many[Offer], model: str, levels: int, looked: bool) -> list[tuple[float, int, bool]]:
        """Chance, sequence, and whether the model is to draft it, of each node; the likeliest first."""
        pool: list[tuple[float, int, bool]] = []
        for index, offer in enumerate(offers):
            found = offer.found if looked else ()
            pool += [(chance, index, False) for chance in found]
            if levels:
                pool += [(chance, index, True) for chance in offer.chain(model, looked)[:levels]]
        pool.sort(key=itemgetter(0), reverse=True)
        return pool
