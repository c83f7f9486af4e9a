"""What looking things up brought for one sequence in one step: nodes with the chances they have had so far."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from spec.budget.members import Record
from spec.budget.merge import merge
from spec.budget.reach import MOST_REACH
from spec.budget.trust import Claims, Runs, behind, claimed
from spec.tree import MAX_NODES, DraftTree

#: What is less likely than this is no candidate.
_LEAST = 0.04
#: Claims that differ by less are one.
_ALIKE = 1e-9


@dataclass(slots=True, eq=False)
class _Looked:
    """One drafter's proposal. marks: by which the trust in each drafted node is told; expected: of each, by that."""

    record: Record
    tree: DraftTree
    trust: Claims | Runs
    marks: list[float]
    expected: list[float]


class Found:
    """The proposals of all who look things up, and what they are worth together. chances: of nodes, likeliest first.
    first: that one at depth 1 comes. names: of those who found anything."""

    def __init__(self) -> None:
        self.chances: list[float] = []
        self.first = 0.0
        self.names: list[str] = []
        self._looked: list[_Looked] = []
        self._trees: list[tuple[DraftTree, list[float], int]] = []

    def add(self, record: Record, tree: DraftTree) -> None:
        """What one of them proposed."""
        marks = claimed(tree)
        trust: Claims | Runs = record.claims if marks else record.runs
        marks = marks or behind(tree, record.runs.now)
        expected = _of_chain(trust, marks) if tree.is_chain else _together(tree, [trust.chance(mark) for mark in marks])
        self._looked.append(_Looked(record, tree, trust, marks, expected))
        chances = trust.reach.chances(expected) if isinstance(trust, Claims) and tree.is_chain else expected
        if max(chances) >= _LEAST:
            self.names.append(tree.drafter)
            self._merge(tree, chances)

    def _merge(self, tree: DraftTree, chances: list[float]) -> None:
        likely = [chance for chance in chances if chance >= _LEAST]
        self._trees.append((tree, chances, len(likely)))
        if len(self._trees) == 1 and tree.is_chain:
            self.chances, self.first = likely, likely[0]
            return
        merged = self.best(MAX_NODES)
        drafted, depths = merged.chances[1:], merged.depths.tolist()[1:]
        self.chances = sorted(drafted, reverse=True)
        self.first = min(1.0, sum(chance for chance, depth in zip(drafted, depths, strict=True) if depth == 1))

    def best(self, nodes: int) -> DraftTree:
        """The likeliest of them as a tree."""
        if len(self._trees) == 1 and self._trees[0][0].is_chain:
            ((tree, chances, likely),) = self._trees
            size = 1 + min(nodes, likely)
            return DraftTree.chain(tree.tokens[:size].tolist(), tree.drafter, (1.0, *chances[: size - 1]))
        trees = [
            merge([replace(tree, chances=(1.0, *chances, *[0.0] * (len(tree) - 1 - len(chances))))], 1 + likely).tree
            for tree, chances, likely in self._trees
        ]
        return merge(trees, most=nodes + 1).tree

    def learn(self, emitted: Many[int]) -> bool:
        """What came says what was right; returns whether something was found, and all of it wrong from the start."""
        missed = bool(self._looked)
        for looked in self._looked:
            right, ended = 0, False
            for node, hit in _trials(looked.tree, emitted):
                if node <= len(looked.expected):
                    looked.trust.saw(looked.marks[node - 1], hit)
                right += hit
                ended = not hit
            if isinstance(looked.trust, Claims) and looked.tree.is_chain and looked.record.pursuit.idle:
                looked.record.pursuit.begin(looked.tree.tokens.tolist()[1:], looked.expected)
            looked.record.runs.went(right, ended)
            missed = missed and not right
        return missed


#: Of a step in which nobody found anything; nothing is added to it.
NOTHING = Found()


def _trials(tree: DraftTree, emitted: Many[int]) -> Iterator[tuple[int, bool]]:
    """The nodes whose parent came, as far as the text is known, and whether they came too."""
    tokens = tree.tokens.tolist()
    if tree.is_chain:
        for node, token in zip(range(1, len(tokens)), emitted, strict=False):
            yield node, tokens[node] == token
            if tokens[node] != token:
                return
        return
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    at = 0
    for token in emitted:
        came = -1
        for child in below.get(at, ()):
            yield child, tokens[child] == token
            came = child if tokens[child] == token else came
        if came < 0:
            return
        at = came


def _of_chain(trust: Claims | Runs, marks: Many[float]) -> list[float]:
    """The chance of each node of a chain, as far as any is likely enough."""
    chances, chance = [], 1.0
    last, given = -1.0, 0.0
    for mark in marks:
        if abs(mark - last) > _ALIKE:  # deep nodes mostly have the same claim
            last, given = mark, trust.chance(mark)
        chance *= given
        chances.append(chance)
        if chance < _LEAST / MOST_REACH:
            break
    return chances


def _together(tree: DraftTree, given: Many[float]) -> list[float]:
    """The chance of each drafted node, of those given its parent."""
    chances = [1.0]
    for parent, chance in zip(tree.parents.tolist()[1:], given, strict=True):
        chances.append(chances[parent] * chance)
    return chances[1:]
