"""A draft from the earlier positions of the text's suffix: a vote at every node, as long as the chances are good.

::

    positions     p     q     r           of the longest context, in the sequence itself and in earlier answers
    runs       x a b x a c y a b       what followed there; the latest position counts most
    nodes      x: 2 of 3   y: 1 of 3   each node continues with the runs that agree so far
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from foresay.drafters.suffix.contexts import END, MOST_POSITIONS, SHORTER, Contexts, Match, cell_of, kind_of
from foresay.spec.budget.chance import Cells

#: What followed a position.
Run = list[int]
#: The weights of votes: the latest position's, the one before it, and so on.
_WEIGHTS = tuple((1 + age) ** -0.75 for age in range(MOST_POSITIONS))


@dataclass(slots=True)
class DraftNodes:
    """A draft as host lists, the root first. cells: of each node's chance in the learnt table."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    cells: list[int] = field(default_factory=lambda: [0])

    def add(self, token: int, parent: int, chance: float, cell: int) -> int:
        """Add a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.cells.append(cell)
        return len(self.tokens) - 1

    def teach(self, trust: Cells, came: Sequence[int]) -> None:
        """Learn from the outcome: ``came`` are the tokens after the root."""
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
class Continuations:
    """What followed earlier occurrences of a text's suffix. lengths: of the contexts, the longest first; runs: for
    each, at most ``MOST_POSITIONS`` from all texts, beginning with the first text's latest position."""

    lengths: list[int]
    runs: list[list[Run]]

    @classmethod
    def of(cls, texts: Sequence[Contexts], matches: Sequence[list[Match]], most: int, levels: int) -> Continuations:
        """From the matches in each text. most: how many lengths of context; levels: tokens of each run."""
        if most == 1:
            lengths = [max((found[-1][0] for found in matches if found), default=0)]
        else:
            lengths = sorted({length for found in matches for length, _ in found}, reverse=True)[:most]
        return cls(lengths, [_runs(texts, matches, length, levels) for length in lengths])


def _runs(texts: Sequence[Contexts], matches: Sequence[list[Match]], length: int, levels: int) -> list[Run]:
    """What followed where at least ``length`` tokens of context match."""
    runs: list[Run] = []
    for text, found in zip(texts, matches, strict=True):
        if not found or found[-1][0] < length:
            continue
        positions = next(positions for known, positions in found if known >= length)
        runs += [_run(text.tokens, position, levels) for position in positions[: len(runs) - MOST_POSITIONS - 1 : -1]]
    return runs


def _run(text: list[int], position: int, levels: int) -> Run:
    """``levels`` tokens from a position on; if the text ends, what followed is repeated."""
    run = text[position : position + levels]
    return run if len(run) == levels else (run * levels)[:levels]


def grow_chain(root: int, found: Continuations, levels: int, trust: Cells, least: float) -> DraftNodes:
    """The token with the most votes at each level, until the chance that all of them are right falls below
    ``least``."""
    grown, chance = DraftNodes([root]), 1.0
    length, runs = found.lengths[0], found.runs[0]
    for depth in range(levels):
        voters, token = len(runs), runs[0][depth]
        if voters > 1:
            votes = _votes(runs, depth)
            if len(votes) > 1:
                token, (_, runs) = max(votes.items(), key=_weight)
        cell = cell_of(length + depth, kind_of(len(runs), voters))
        chance *= trust.chances[cell]
        if token == END or chance < least:
            break
        grown.add(token, depth, chance, cell)
    return grown


def grow_tree(root: int, found: Continuations, levels: int, nodes: int, trust: Cells, least: float) -> DraftNodes:
    """The likeliest ``nodes`` nodes (including the root), none less likely than ``least``.

    Below the root are the continuations of the longest context and, with the chance that is left, those of shorter
    ones.
    """
    grown = DraftNodes([root])
    # Minus the chance, a number to break ties, token, parent, cell, depth, context length, the runs that agree.
    heap: list[tuple[float, int, int, int, int, int, int, list[Run]]] = []
    numbers = count()

    def push(token: int, parent: int, chance: float, cell: int, depth: int, length: int, runs: list[Run]) -> None:
        if token != END and chance >= least:
            heapq.heappush(heap, (-chance, next(numbers), token, parent, cell, depth, length, runs))

    def expand(node: int, depth: int, length: int, runs: list[Run]) -> set[int]:
        votes = _votes(runs, depth)
        for token, (_, agreeing) in votes.items():
            cell = cell_of(length, kind_of(len(agreeing), len(runs)))
            push(token, node, grown.chances[node] * trust.chances[cell], cell, depth + 1, length + 1, agreeing)
        return set(votes)

    known = expand(0, 0, found.lengths[0], found.runs[0])
    left = max(0.0, 1.0 + sum(entry[0] for entry in heap))
    for length, runs in zip(found.lengths[1:], found.runs[1:], strict=True):
        cell = cell_of(length, SHORTER)
        for token, (_, agreeing) in _votes(runs, 0).items():
            if token not in known:
                push(token, 0, left * trust.chances[cell], cell, 1, length + 1, agreeing)
                known.add(token)
    while heap and len(grown.tokens) < nodes:
        chance, _, token, parent, cell, depth, length, runs = heapq.heappop(heap)
        node = grown.add(token, parent, -chance, cell)
        if depth < levels:
            expand(node, depth, length, runs)
    return grown


def _votes(runs: list[Run], depth: int) -> dict[int, tuple[float, list[Run]]]:
    """The votes ``depth`` tokens on: the weight of each token, and the runs that have it."""
    tokens = [run[depth] for run in runs]
    if tokens.count(tokens[0]) == len(tokens):
        return {tokens[0]: (1.0, runs)}
    votes: dict[int, tuple[float, list[Run]]] = {}
    for token, weight, run in zip(tokens, _WEIGHTS, runs, strict=False):
        if token in votes:
            before, agreeing = votes[token]
            agreeing.append(run)
            votes[token] = before + weight, agreeing
        else:
            votes[token] = weight, [run]
    return votes


def _weight(vote: tuple[int, tuple[float, list[Run]]]) -> float:
    return vote[1][0]
