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
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from spec.tree import MAX_NODES, TreeShape

#: Tokens that drafting must bring more than none; chances are only estimates, and the best looks better than it is.
EDGE = 0.02
#: A model is asked for no more levels once one more is worth so many tokens less than the best of fewer.
_FALLEN = 0.05


class Grove(NamedTuple):
    """What is expected of a tree: accepted nodes, verified ones once their chances are known, and levels drafted."""

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What could be drafted for one sequence.

    found: the chances of nodes that were looked up, likeliest first. first: that one of them at depth 1 comes; a model
    is of no use then. models: by name, the chance of each level's node of a chain, alone. beside: the same where what
    was looked up is wrong at depth 1, as chances of the model alone. trees: by name and shape.
    """

    found: Many[float] = ()
    first: float = 0.0
    models: Mapping[str, Many[float]] = field(default_factory=dict)
    beside: Mapping[str, Many[float]] = field(default_factory=dict)
    trees: Mapping[str, Mapping[TreeShape, Grove]] = field(default_factory=dict)

    def tree(self, model: str, shape: TreeShape, looked: bool) -> Grove:
        """What is expected of a tree; looked: beside what was found."""
        grove = self.trees.get(model, {}).get(shape, Grove())
        if not (looked and self.found and grove.tokens):
            return grove
        alone, beside = self.models.get(model), self.beside.get(model)
        missed = (1.0 - self.first) * (beside[0] / alone[0] if alone and beside else 1.0)
        return grove._replace(tokens=missed * grove.tokens)


@dataclass(frozen=True, slots=True)
class Taken:
    """One way of drafting at its best size. model: "" for what was found alone. found, levels: of each sequence, how
    many found nodes and how many of the model's levels. tokens, seconds: expected of the step. tree: the model's shape
    if it is no chain of a given length."""

    model: str
    found: tuple[int, ...]
    levels: tuple[int, ...]
    tokens: float
    seconds: float
    tree: TreeShape | None = None

    @property
    def pace(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds

    def value(self, pace: float) -> float:
        """Tokens beyond those that would come in the same time at a pace."""
        return self.tokens - pace * self.seconds

    @property
    def nodes(self) -> int:
        """Drafted ones, of all sequences."""
        if self.tree is None:
            return sum(self.found) + sum(self.levels)
        return sum(self.found) + (self.tree.nodes - 1) * sum(map(bool, self.levels))

    @property
    def kind(self) -> tuple[str, bool]:
        """Which drafters take part: the model, and whether anything found does."""
        return self.model, any(self.found)


#: Seconds of a draft: by the model's name, levels and nodes.
DraftSeconds = Callable[[str, float, float], float]


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
    plain = Taken("", (0,) * len(offers), (0,) * len(offers), float(len(offers)), seconds[len(offers)])
    ways = [plain]
    looked = any(offer.found for offer in offers)
    if looked:
        ways.append(scale.best(offers, "", 0, True, 0.0))
    for model in {name: None for offer in offers for name in offer.models}:
        for beside in (False, True) if looked else (False,):
            ways += scale.deepest(offers, model, beside, draft_seconds)
            for shape in {shape: None for offer in offers for shape in offer.trees.get(model, ())}:
                ways.append(scale.tree(offers, model, shape, beside, draft_seconds))
    kinds: dict[tuple[str, bool], Taken] = {}
    for way in ways:
        known = kinds.get(way.kind)
        if known is None or way.value(pace) > known.value(pace):
            kinds[way.kind] = way
    ranked = sorted(kinds.values(), key=lambda way: -way.value(pace))
    if ranked[0].value(pace) < plain.value(pace) + EDGE * len(offers):
        ranked.remove(plain)
        ranked.insert(0, plain)
    return ranked


def weigh_pinned(
    offers: Many[Offer], seconds: Many[float], draft_seconds: DraftSeconds, levels: int, nodes: int
) -> list[Taken]:
    """The same where the shape is given: only who drafts it is chosen, and somebody does who has anything to say."""
    none, count = (0,) * len(offers), len(offers)
    found = tuple(min(len(offer.found), nodes) for offer in offers)
    ways = []
    if any(found):
        brought = sum(sum(offer.found[:taken]) for offer, taken in zip(offers, found, strict=True))
        ways.append(Taken("", found, none, count + brought, _of_rows(seconds, count + sum(found))))
    for model in {name: None for offer in offers for name in offer.models}:
        chains = [offer.models.get(model, ())[:levels] for offer in offers]
        taken = _of_rows(seconds, count + nodes * sum(map(bool, chains))) + draft_seconds(model, levels, nodes)
        ways.append(Taken(model, none, tuple(map(len, chains)), count + sum(map(sum, chains)), taken))
    ways.sort(key=lambda way: -way.pace)
    return [*ways, Taken("", none, none, float(count), seconds[count])]


def _of_rows(seconds: Many[float], rows: int) -> float:
    return seconds[min(rows, len(seconds) - 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """What nodes are weighed with: see :func:`weigh`."""

    seconds: Many[float]
    pace: float
    most: int
    branching: float

    def deepest(self, offers: Many[Offer], model: str, beside: bool, draft_seconds: DraftSeconds) -> list[Taken]:
        """The best size at each depth of a model, until going deeper does not pay."""
        ways: list[Taken] = []
        best = -math.inf
        for levels in range(1, max(len(offer.models.get(model, ())) for offer in offers) + 1):
            way = self.best(offers, model, levels, beside, draft_seconds(model, levels, levels))
            ways.append(way)
            value = way.value(self.pace)
            if value < best - _FALLEN:
                break
            best = max(best, value)
        return ways

    def tree(
        self, offers: Many[Offer], model: str, shape: TreeShape, looked: bool, draft_seconds: DraftSeconds
    ) -> Taken:
        """A whole tree for each sequence that may have one, beside the best of what was found, or alone."""
        trees = [offer.tree(model, shape, looked) for offer in offers]
        gains, rows = [grove.tokens for grove in trees], round(sum(grove.nodes for grove in trees))
        deepest = max(grove.levels for grove in trees)
        beyond = self.seconds[min(rows, len(self.seconds) - len(offers) - 1) :]
        drafting = draft_seconds(model, deepest, deepest if shape.is_chain else shape.nodes - 1)
        found = _Scale(beyond, self.pace, self.most, 0.0).best(offers, "", 0, looked, drafting)
        branched = sum(
            bool(gain and (nodes or not shape.is_chain)) for gain, nodes in zip(gains, found.found, strict=True)
        )
        levels = tuple(shape.levels if gain else 0 for gain in gains)
        spent = found.seconds + self.branching * branched
        return Taken(model, found.found, levels, found.tokens + sum(gains), spent, shape)

    def best(self, offers: Many[Offer], model: str, levels: int, looked: bool, drafting: float) -> Taken:
        """The likeliest nodes of all sequences, as many as are worth most. looked: whether found ones take part."""
        pool = self._pool(offers, model, levels, looked)
        rows = len(offers)
        count, value, best = 0, 0.0, 0.0
        for taken, (chance, _, _) in enumerate(pool[: len(self.seconds) - rows - 1], start=1):
            value += chance
            worth = value - self.pace * (self.seconds[rows + taken] - self.seconds[rows])
            if worth > best:
                best, count = worth, taken
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
            if model and found:
                missed = 1.0 - offer.first
                pool += [(missed * chance, index, True) for chance in offer.beside.get(model, ())[:levels]]
            elif model:
                pool += [(chance, index, True) for chance in offer.models.get(model, ())[:levels]]
        pool.sort(key=lambda node: -node[0])
        return pool
