"""What looking things up brought for one sequence in one step: nodes with the chances they have had so far."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from spec.budget.claims import LEAST, Claims, claimed
from spec.budget.merge import merge
from spec.budget.reach import Pursuit
from spec.tree import MAX_NODES, DraftTree

#: Of a drafter that claims nothing: the chance of its next token behind so many in a row that were right.
_RUN_EDGES, _RUN_CLAIMS = (1, 2, 3, 5, 9, 17), (0.15, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


@dataclass(slots=True, eq=False)
class Looking:
    """What one sequence has shown of one who looks things up. run: tokens in a row that it has been right on by now.
    pursuit: the chain of it that is followed."""

    claims: Claims
    run: int = 0
    pursuit: Pursuit = field(init=False)

    def __post_init__(self) -> None:
        self.pursuit = Pursuit(self.claims.reach)

    def marks(self, tree: DraftTree) -> list[float]:
        """The claim of each drafted node, given its parent: the drafter's, or by how long it has been right."""
        depths: Many[int] = range(1, len(tree)) if tree.is_chain else tree.depths.tolist()[1:]
        return claimed(tree) or [_RUN_CLAIMS[bisect.bisect_right(_RUN_EDGES, self.run + depth - 1)] for depth in depths]


@dataclass(slots=True, eq=False)
class _Proposal:
    """One drafter's tree. marks: the claim of each drafted node; expected: its chance by these; chances: and by its
    depth."""

    looking: Looking
    tree: DraftTree
    marks: list[float]
    expected: list[float]
    chances: list[float]


class Found:
    """The proposals of all who look things up, and what they are worth together. chances: of nodes, likeliest first.
    first: that one at depth 1 comes. names: of those who found anything."""

    def __init__(self) -> None:
        self.chances: list[float] = []
        self.first = 0.0
        self.names: list[str] = []
        self._all: list[_Proposal] = []
        self._likely: list[DraftTree] = []

    def plus(self, looking: Looking, tree: DraftTree | None) -> Found:
        """With what one more of them proposed; None is nothing."""
        if tree is None:
            looking.run = 0
            return self
        found = Found() if self is NOTHING else self
        marks = looking.marks(tree)
        expected = looking.claims.chances(tree, marks)
        chances = looking.claims.reach.chances(expected) if tree.is_chain else expected
        found._all.append(_Proposal(looking, tree, marks, expected, chances))
        if max(chances) >= LEAST:
            found.names.append(tree.drafter)
            found._merge(tree, chances)
        return found

    def _merge(self, tree: DraftTree, chances: list[float]) -> None:
        likely = [chance for chance in chances if chance >= LEAST]
        if tree.is_chain:
            tokens = tree.tokens[: 1 + len(likely)].tolist()
            self._likely.append(DraftTree.chain(tokens, tree.drafter, (1.0, *likely)))
        else:
            self._likely.append(merge([replace(tree, chances=(1.0, *chances))], 1 + len(likely)).tree)
        if len(self._likely) == 1 and tree.is_chain:
            self.chances, self.first = likely, likely[0]
            return
        merged = self.best(MAX_NODES)
        drafted, depths = merged.chances[1:], merged.depths.tolist()[1:]
        self.chances = sorted(drafted, reverse=True)
        self.first = min(1.0, sum(chance for chance, depth in zip(drafted, depths, strict=True) if depth == 1))

    def best(self, nodes: int) -> DraftTree:
        """The likeliest of them as a tree."""
        return merge(self._likely, most=nodes + 1).tree

    def learn(self, emitted: Many[int]) -> bool:
        """What came says what was right; returns whether something was found, and all of it wrong from the start."""
        missed = bool(self._all)
        for one in self._all:
            right, ended = 0, False
            for node, hit in _trials(one.tree, emitted):
                if node <= len(one.expected):
                    one.looking.claims.saw(one.marks[node - 1], hit)
                right += hit
                ended = not hit
            if one.tree.is_chain and one.looking.pursuit.idle:
                one.looking.pursuit.begin(one.tree.tokens.tolist()[1:], one.expected)
            one.looking.run = 0 if ended else one.looking.run + right
            missed = missed and not right
        return missed


#: Of a step in which nobody found anything; nothing is added to it.
NOTHING = Found()


def _trials(tree: DraftTree, emitted: Many[int]) -> Iterator[tuple[int, bool]]:
    """The nodes whose parent came, as far as the text is known, and whether they came too."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    at, begin = 0, 1
    for token in emitted:
        came = -1
        for node in range(begin, len(tokens)):
            if parents[node] == at:
                yield node, tokens[node] == token
                came = node if tokens[node] == token else came
            elif tree.is_chain:
                break
        if came < 0:
            return
        at, begin = came, came + 1
