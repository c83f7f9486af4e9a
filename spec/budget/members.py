"""Who can be asked to draft, and what is known of each: cost, and how often it is right in which situation.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
      claims     its own chance of each node, in bins: how often that many come true
      runs       one that claims nothing: by how many tokens in a row it has been right by now, drafted ones included
    models     by depth; and at depth 1 apart where what was looked up is wrong, since both are often right together
    trees      of a model, three of them: by depth as well, taken to be right where the chain would miss now and then
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from spec.budget.cost import DraftCost
from spec.budget.rates import OwnRates, Rates
from spec.budget.weigh import Grove
from spec.protocols import Drafter
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: What a model is taken to be right in before anybody knows: alone, and where what was looked up is wrong.
_MODEL_GUESS, _BESIDE_GUESS = 0.6, 0.4
#: The trees that a model can be asked for, and how often one that is twice or more as wide as a chain still misses
#: where the chain does, before anybody knows.
TREES = (TreeShape((3, 2, 1)), TreeShape((4, 4, 3, 3)), TreeShape((6, 6, 5, 5, 5, 4)))
_STILL_MISSED = (0.7, 0.6, 0.5)
#: What is taken to be verified of a tree, and how far it is taken to grow, before anybody knows.
_KEPT, _GROWN = 0.8, 0.9
#: A model whose chain begins rightly more seldom is offered no trees.
_LEAST_FOR_TREES = 0.15
_CLAIM_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_CLAIM_GUESSES = (0.05, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98)
_RUN_EDGES = (1, 2, 3, 5, 9, 17)
_RUN_GUESSES = (0.15, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


@dataclass(slots=True, eq=False)
class Bush:
    """A tree that a model can be asked for. kept: how many of its nodes were worth verifying lately; levels: how many
    it was grown by."""

    shape: TreeShape
    rates: Rates
    kept: float
    levels: float

    @classmethod
    def of(cls, shape: TreeShape) -> Bush:
        """Nothing is known of it."""
        return cls(shape, Rates([_MODEL_GUESS] * shape.levels), _KEPT * (shape.nodes - 1), _GROWN * shape.levels)


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. rates: of all sequences; beside: see the module. asked: how often it was
    lately asked, of the steps that might have. bushes: what it can be asked for beside chains.
    """

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    rates: Rates = field(default_factory=lambda: Rates(_CLAIM_GUESSES + _RUN_GUESSES))
    beside: Rates = field(default_factory=lambda: Rates([_BESIDE_GUESS]))
    asked: float = 1.0
    bushes: list[Bush] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What settings, requests and traces call it."""
        return self.drafter.name

    @classmethod
    def looking(cls, drafter: Drafter, levels: int = LOOKED_LEVELS) -> Member:
        """One that looks things up in the text, or in what the request brought along."""
        return cls(drafter, True, levels)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """One that computes."""
        bushes = [Bush.of(tree.limited(levels)) for tree in TREES]
        return cls(drafter, False, levels, cost, Rates([_MODEL_GUESS] * levels, chained=True), bushes=bushes)


@dataclass(slots=True, eq=False)
class Record:
    """What one sequence has shown of one member. run: tokens in a row that it has been right on by now. drafted_at: the
    length of the text when it last drafted."""

    member: Member
    rates: OwnRates
    beside: OwnRates
    run: int = 0
    drafted_at: int = 0
    trees: list[OwnRates] = field(default_factory=list)

    @classmethod
    def of(cls, member: Member, sequence: Sequence) -> Record:
        """Nothing yet."""
        trees = [OwnRates(bush.rates) for bush in member.bushes]
        rates, beside = OwnRates(member.rates), OwnRates(member.beside)
        return cls(member, rates, beside, drafted_at=len(sequence.tokens), trees=trees)

    def chain(self, levels: int) -> list[float]:
        """The chance of each node of a model's chain."""
        chances, chance = [], 1.0
        for depth in range(min(levels, self.member.levels)):
            chance *= self.rates.chance(depth)
            chances.append(chance)
        return chances

    def bushes(self, levels: int) -> dict[TreeShape, Grove]:
        """What is expected of each tree no deeper than ``levels``."""
        if self.rates.chance(0) < _LEAST_FOR_TREES:
            return {}
        found = {}
        for bush, rates, missed in zip(self.member.bushes, self.trees, _STILL_MISSED, strict=True):
            if bush.shape.levels <= levels:
                chance, tokens = 1.0, 0.0
                for depth in range(bush.shape.levels):
                    chance *= rates.held(depth, 1.0 - (1.0 - self.rates.chance(depth)) * missed)
                    tokens += chance
                found[bush.shape] = Grove(tokens, bush.kept, bush.levels)
        return found

    def learn(self, tree: DraftTree, emitted: Many[int], accepted: int) -> bool:
        """What came says how deep the model was right; returns whether it was at depth 1.

        accepted: nodes, of what was verified; what came of nodes that were cut off is no merit of the tree.
        """
        hits, first = followed(tree, emitted)
        for depth, hit in enumerate(first):
            self.rates.saw(depth, hit)
        if not tree.is_chain:
            rates = self._rates_of(tree)
            for depth, hit in enumerate(hits[: accepted + 1] if rates is not None else ()):
                rates.saw(depth, hit and depth < accepted)  # type: ignore[union-attr]
        return bool(hits and hits[0])

    def _rates_of(self, tree: DraftTree) -> OwnRates | None:
        """Of the smallest of the trees that it fits: a drafter may fill a shape in its own way, or not to the end."""
        for bush, rates in zip(self.member.bushes, self.trees, strict=True):
            if len(tree) <= bush.shape.nodes:
                return rates
        return None

    def behind_wrong(self, alone: Many[float]) -> list[float]:
        """The same where what was looked up is wrong."""
        if not alone or not alone[0]:
            return []
        factor = self.beside.chance(0) / alone[0]
        return [min(1.0, factor * chance) for chance in alone]

    def cells(self, tree: DraftTree, depths: Many[int]) -> list[int]:
        """Where the trust in each drafted node of a looked up tree is kept."""
        claims = tree.chances
        if len(claims) != len(tree):
            first = len(_CLAIM_GUESSES)
            return [first + bisect.bisect_right(_RUN_EDGES, self.run + depth - 1) for depth in depths]
        parents = range(len(claims) - 1) if tree.is_chain else tree.parents.tolist()[1:]
        return [
            bisect.bisect_right(_CLAIM_EDGES, claim / claims[parent] if claims[parent] else 0.0)
            for claim, parent in zip(claims[1:], parents, strict=True)
        ]


def followed(tree: DraftTree, emitted: Many[int]) -> tuple[list[bool], list[bool]]:
    """By depth, as far as the text is known: whether a node came, and, as long as these came, whether the first did.

    Of siblings the first is the one that a chain would have.
    """
    tokens = tree.tokens.tolist()
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    hits: list[bool] = []
    firsts: list[bool] = []
    at = 0
    for token in emitted:
        children = below.get(at)
        if not children:
            break
        came = [child for child in children if tokens[child] == token]
        hits.append(bool(came))
        if all(firsts):
            firsts.append(came == children[:1])
        if not came:
            break
        at = came[0]
    return hits, firsts
