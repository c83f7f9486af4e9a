"""A draft from the places where the text's end stood before: a vote at every node, as long as the chances are good.

::

    places     p  q  r                 of the longest context, in the sequence itself and in earlier answers
    votes      x  x  y                 what followed there; the latest place counts most
    nodes      x: 2 of 3  y: 1 of 3    each with the places that agree, one further on: they vote below it
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from drafters.suffix.contexts import END, MOST_PLACES, Contexts, Match
from drafters.suffix.trust import SHORTER, Trust, cell_of, kind_of

#: A text and a place in it.
Spot = tuple[list[int], int]
#: What the latest place's vote counts, the one before it, and so on.
_WEIGHTS = tuple((1 + age) ** -0.5 for age in range(MOST_PLACES))


@dataclass(slots=True)
class Grown:
    """A draft as host lists, the root first. cells: where the trust in each node is kept."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    cells: list[int] = field(default_factory=lambda: [0])

    def add(self, token: int, parent: int, chance: float, cell: int) -> int:
        """A node more; its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.cells.append(cell)
        return len(self.tokens) - 1

    def teach(self, trust: Trust, came: Many[int]) -> None:
        """Tell what became of it: ``came`` are the tokens behind the root."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        node = 0
        for token in came:
            hit = None
            for child in below.get(node, ()):
                trust.saw(self.cells[child], self.tokens[child] == token)
                if self.tokens[child] == token:
                    hit = child
            if hit is None:
                return
            node = hit


@dataclass(slots=True)
class Found:
    """Where the end of a text stood before. lengths: of the contexts, the longest first; spots: of each, at most
    ``MOST_PLACES`` in all texts, the first text's latest place first."""

    lengths: list[int]
    spots: list[list[Spot]]

    @classmethod
    def of(cls, tokens: list[int], texts: Many[Contexts], most: int) -> Found:
        """Look the end of ``tokens`` up in all texts; ``most`` lengths at most."""
        matches = [text.matches(tokens) for text in texts]
        lengths = sorted({length for found in matches for length, _ in found}, reverse=True)[:most]
        return cls(lengths, [_spots(texts, matches, length) for length in lengths])


def _spots(texts: Many[Contexts], matches: Many[list[Match]], length: int) -> list[Spot]:
    """Where at least ``length`` tokens of context match."""
    spots: list[Spot] = []
    for text, found in zip(texts, matches, strict=True):
        for least, places in found:
            if least >= length:
                spots += [(text.tokens, place) for place in places[: -MOST_PLACES - 1 : -1]]
                break
    return spots[:MOST_PLACES]


def grow_chain(root: int, found: Found, levels: int, trust: Trust, least: float) -> Grown:
    """The token with most votes at each level, until the chance of all of them to be right falls below ``least``."""
    grown, chance = Grown([root]), 1.0
    length, spots = found.lengths[0], found.spots[0]
    for depth in range(levels):
        voters = _votes(spots, depth)
        token, (_, agreeing) = max(voters.items(), key=lambda item: item[1][0])
        cell = cell_of(length + depth, kind_of(len(agreeing), len(spots)))
        chance *= trust.chances[cell]
        if token == END or chance < least:
            break
        grown.add(token, depth, chance, cell)
        spots = agreeing
    return grown


def grow_tree(root: int, found: Found, levels: int, nodes: int, trust: Trust, least: float) -> Grown:
    """The likeliest ``nodes`` nodes (the root among them), none less likely than ``least``.

    Below the root come what followed the longest context and, in what chance that leaves, what followed shorter ones.
    """
    grown = Grown([root])
    # Minus the chance, a number that decides between equals, token, parent, depth, cell, the places that agree.
    heap: list[tuple[float, int, int, int, int, int, list[Spot]]] = []
    length, pushed = found.lengths[0], 0

    def push(spots: list[Spot], parent: int, depth: int) -> set[int]:
        nonlocal pushed
        votes = _votes(spots, depth)
        for token, (_, agreeing) in votes.items():
            cell = cell_of(length + depth, kind_of(len(agreeing), len(spots)))
            chance = grown.chances[parent] * trust.chances[cell]
            if token != END and chance >= least:
                pushed += 1
                heapq.heappush(heap, (-chance, pushed, token, parent, depth + 1, cell, agreeing))
        return set(votes)

    known = push(found.spots[0], 0, 0)
    left = max(0.0, 1.0 + sum(entry[0] for entry in heap))
    for shorter, spots in zip(found.lengths[1:], found.spots[1:], strict=True):
        for token, (_, agreeing) in _votes(spots, 0).items():
            chance = left * trust.chances[cell := cell_of(shorter, SHORTER)]
            if token not in known and token != END and chance >= least:
                pushed += 1
                heapq.heappush(heap, (-chance, pushed, token, 0, 1, cell, agreeing))
            known.add(token)
    while heap and len(grown.tokens) < nodes:
        chance, _, token, parent, depth, cell, spots = heapq.heappop(heap)
        node = grown.add(token, parent, -chance, cell)
        if depth < levels:
            push(spots, node, depth)
    return grown


def _votes(spots: list[Spot], depth: int) -> dict[int, tuple[float, list[Spot]]]:
    """What followed the places, ``depth`` tokens on: the weight of each token, and the places that say so."""
    if len(spots) == 1:
        return {_token(*spots[0], depth): (1.0, spots)}
    votes: dict[int, tuple[float, list[Spot]]] = {}
    for weight, spot in zip(_WEIGHTS, spots, strict=False):
        token = _token(*spot, depth)
        before = votes.get(token)
        if before is None:
            votes[token] = weight, [spot]
        else:
            before[1].append(spot)
            votes[token] = before[0] + weight, before[1]
    return votes


def _token(text: list[int], place: int, depth: int) -> int:
    """What stands ``depth`` tokens behind a place; where the text ends, it is thought to repeat itself."""
    here = place + depth
    return text[here] if here < len(text) else text[place + depth % (len(text) - place)]
