"""What looking things up brought for one sequence in one step: nodes with the chances they have had so far."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from spec.budget.members import Record
from spec.budget.merge import merge
from spec.tree import DraftTree

#: What is less likely than this is no candidate.
_LEAST = 0.02


@dataclass(slots=True, eq=False)
class _Looked:
    """One drafter's proposal. cells: where the trust in each drafted node is kept."""

    record: Record
    tree: DraftTree
    cells: list[int]


class Found:
    """The proposals of all who look things up, and what they are worth together. chances: of nodes, likeliest first.
    first: that one at depth 1 comes. names: of those who found anything."""

    def __init__(self) -> None:
        self.chances: list[float] = []
        self.first = 0.0
        self.names: list[str] = []
        self._looked: list[_Looked] = []
        self._silent: list[Record] = []
        self._trees: list[DraftTree] = []

    def add(self, record: Record, tree: DraftTree) -> None:
        """What one of them proposed."""
        if len(tree) == 1:
            self._silent.append(record)
            return
        depths: Many[int] = range(1, len(tree)) if tree.is_chain else tree.depths.tolist()[1:]
        cells = record.cells(tree, depths)
        self._looked.append(_Looked(record, tree, cells))
        believed = _believed(tree, [record.rates.chance(cell) for cell in cells])
        kept = merge([believed], most=sum(chance >= _LEAST for chance in believed.chances)).tree
        if len(kept) > 1:
            self._trees = [merge([*self._trees, kept]).tree] if self._trees else [kept]
            self.names.append(tree.drafter)
            self._sort()

    def _sort(self) -> None:
        tree = self._trees[0]
        self.chances = sorted(tree.chances[1:], reverse=True)
        if tree.is_chain:
            self.first = tree.chances[1]
        else:
            depths = tree.depths.tolist()
            self.first = min(1.0, sum(c for c, depth in zip(tree.chances, depths, strict=True) if depth == 1))

    def best(self, nodes: int) -> DraftTree:
        """The likeliest of them as a tree."""
        return merge(self._trees, most=nodes + 1).tree

    def learn(self, emitted: Many[int]) -> bool:
        """What came says what was right; returns whether something was found, and all of it wrong from the start."""
        for record in self._silent:
            record.run = 0
        missed = bool(self._looked)
        for looked in self._looked:
            right, ended = 0, False
            for node, hit in _trials(looked.tree, emitted):
                looked.record.rates.saw(looked.cells[node - 1], hit)
                right += hit
                ended = not hit
            run = looked.record.run
            looked.record.run = 0 if ended else run + right
            missed = missed and not right
        return missed


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


def _believed(tree: DraftTree, given: Many[float]) -> DraftTree:
    """The tree with the chances that come of each node's chance given its parent."""
    chances = [1.0]
    parents = range(len(tree)) if tree.is_chain else tree.parents.tolist()[1:]
    for parent, chance in zip(parents, given, strict=False):
        chances.append(chances[parent] * chance)
    return replace(tree, chances=tuple(chances))
