"""Who can be asked to draft, and what is known of each: cost, and how often it is right in which situation.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
      trust      how far its drafts are right in this text, by what it claims of them (:mod:`spec.budget.trust`)
    models     by depth; and at depth 1 apart where what was looked up is wrong, since both are often right together
    trees      of a model: what their nodes' chances add up to, and how much of it comes (:mod:`spec.budget.grown`)
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from spec.budget.cost import DraftCost
from spec.budget.grown import Grown, OwnGrown
from spec.budget.rates import OwnRates, Rates
from spec.budget.reach import Pursuit
from spec.budget.trust import Claims, Runs, Salts, of_runs
from spec.budget.ways import Grove
from spec.protocols import CatchesUp, Drafter, LooksUp
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: What a model is taken to be right in before anybody knows, and which share of what it is right in alone where what
#: was looked up is wrong.
_MODEL_GUESS, _BESIDE_SHARE = 0.6, 0.65
#: As many trials as that counts: one that begins with bad luck should not be out for a thousand steps.
_GUESSED = 16.0
#: The tree that a model can be asked for, grown as far as it looks worth it.
OPEN = TreeShape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2))
#: By how much of how unsure they are the chances of models are read too high.
_HOPE = 0.7
#: What is left of earlier steps in how often a member was asked, after one more.
_REMEMBERED = 0.99
#: A model whose chain begins rightly more seldom, or was tried no oftener, is offered no trees.
_LEAST_FOR_TREES, _TRIED = 0.15, 2
#: So deep a chain is looked at where trees are known, which are mostly better.
_FEW = 3


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. rates: of all sequences; beside: see the module. asked: how often it was
    lately asked, of the steps that might have. grown: what its tree brings, if it can be asked for one. salts: what was
    shown of its claims.
    """

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    rates: Rates = field(default_factory=of_runs)
    salts: Salts = field(default_factory=Salts)
    beside: Rates = field(default_factory=lambda: Rates([_MODEL_GUESS * _BESIDE_SHARE]))
    asked: float = 1.0
    grown: Grown | None = None
    learnt: int = 0
    _part: bool = False
    _catches_up: CatchesUp | None = field(init=False, default=None)
    _looks_up: LooksUp | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Asked once: it takes longer than all that is asked of the drafter then.
        self._catches_up = self.drafter if isinstance(self.drafter, CatchesUp) else None
        self._looks_up = self.drafter if isinstance(self.drafter, LooksUp) else None

    @property
    def name(self) -> str:
        """What settings, requests and traces call it."""
        return self.drafter.name

    def rest(self, sequence: Sequence) -> int:
        """Tokens that it has to catch up with, beside the last one, before it can draft."""
        return 0 if self._catches_up is None else max(0, self._catches_up.unread(sequence) - 1)

    def find(self, sequences: Many[Sequence]) -> list[DraftTree | None]:
        """What looking up finds for each of them; None for nothing."""
        shapes = [_chain(min(self.levels, sequence.most_levels)) for sequence in sequences]
        if self._looks_up is not None:
            return self._looks_up.find(sequences, shapes)
        trees = self.drafter.propose(sequences, shapes)
        return [tree if len(tree) > 1 else None for tree in trees]

    def took_part(self, part: bool, repeated: int) -> None:
        """Whether it drafts in a step; in so many before it, it did what it did in the one before them."""
        kept = _REMEMBERED**repeated
        self.asked = _REMEMBERED * (kept * self.asked + (1 - kept) * self._part) + (1 - _REMEMBERED) * part
        self._part = part

    @classmethod
    def looking(cls, drafter: Drafter, levels: int = LOOKED_LEVELS) -> Member:
        """One that looks things up in the text, or in what the request brought along."""
        return cls(drafter, True, levels)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """One that computes."""
        rates = Rates([_MODEL_GUESS] * levels, chained=True, hope=_HOPE, guessed=_GUESSED)
        return cls(drafter, False, levels, cost, rates, grown=Grown())


#: The shape of a chain, made once.
_chain = lru_cache(TreeShape.chain)


class Expected(NamedTuple):
    """Of a model's chain the chance of each node (of the first few alone, where trees are known), and what its tree
    brings, if it may be asked for one; after as much was learnt of it."""

    chain: list[float]
    tree: Grove | None
    levels: int
    learnt: int


@dataclass(slots=True, eq=False)
class Record:
    """What one sequence has shown of one member. rates, beside, grown: of a model; claims, runs: of one that looks
    things up; pursuit: the chain of it that is followed."""

    member: Member
    rates: OwnRates
    beside: OwnRates
    claims: Claims
    runs: Runs
    pursuit: Pursuit
    grown: OwnGrown | None = None
    _expected: Expected | None = None

    @classmethod
    def of(cls, member: Member, sequence: Sequence) -> Record:
        """Nothing yet, but for what its salt showed."""
        grown = None if member.grown is None else OwnGrown(member.grown)
        rates, beside = OwnRates(member.rates), OwnRates(member.beside)
        claims = member.salts.claims(sequence.salt) if member.looks else Claims()
        return cls(member, rates, beside, claims, Runs(member.rates), Pursuit(claims.reach), grown)

    def expected(self, levels: int, trees: bool = True) -> Expected:
        """Of a model, no deeper than ``levels``: remembered until more is learnt of it. trees: whether it may be asked
        for one, which is the same whenever this is called."""
        known, learnt, levels = self._expected, self.member.learnt, min(levels, self.member.levels)
        if known is None or known.levels != levels or known.learnt != learnt:
            grown = self.member.grown
            chain = self._chain(min(_FEW, levels) if trees and grown is not None and grown.known else levels)
            known = self._expected = Expected(chain, self._tree(chain, levels) if trees else None, levels, learnt)
        return known

    @property
    def expected_tree(self) -> Grove | None:
        """Of a model's tree, when it was last asked what is expected."""
        return None if self._expected is None else self._expected.tree

    def _chain(self, levels: int) -> list[float]:
        chances, chance = [], 1.0
        for depth in range(levels):
            chance *= self.rates.chance(depth)
            chances.append(chance)
        return chances

    def _tree(self, chain: list[float], levels: int) -> Grove | None:
        rates = self.member.rates
        tried = rates.trials[0] > _TRIED and rates.chance(0) >= _LEAST_FOR_TREES
        if self.grown is None or not tried:
            return None
        grove = self.grown.expected(chain)
        return grove._replace(tokens=min(grove.tokens, levels), levels=min(grove.levels, levels))

    def learn(
        self, tree: DraftTree, emitted: Many[int], accepted: int, chain: bool = True, grown: Grove | None = None
    ) -> bool:
        """What came says how deep the model was right; returns whether a chain would have been at depth 1.

        accepted: nodes, of what was verified. chain: it was asked for one of a given length; what else is deep is what
        looked likely, so its hits alone say too much. grown: what its chances add up to, if it grew by these.
        """
        self.member.learnt += 1
        hits, first = followed(tree, emitted)
        for depth, hit in enumerate(first if chain else first[:1]):
            self.rates.saw(depth, hit)
        if grown is not None and self.grown is not None:
            self.grown.saw(grown, sum(hits[: min(accepted, len(hits))]))
        elif chain and self.member.grown is not None:
            self.member.grown.missed()
        return bool(first and first[0])

    def behind_wrong(self, alone: Many[float]) -> list[float]:
        """The same where what was looked up is wrong."""
        if not alone or not alone[0]:
            return []
        factor = self.beside.held(0, _BESIDE_SHARE * alone[0]) / alone[0]
        return [min(1.0, factor * chance) for chance in alone]


def followed(tree: DraftTree, emitted: Many[int]) -> tuple[list[bool], list[bool]]:
    """By depth, as far as the text is known: whether a node came, and, as long as these came, whether the first did.

    Of siblings the first is the one that a chain would have.
    """
    tokens = tree.tokens.tolist()
    if tree.is_chain:
        came = [drafted == token for drafted, token in zip(tokens[1:], emitted, strict=False)]
        right = came[: came.index(False) + 1] if False in came else came
        return right, list(right)
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
        same = [child for child in children if tokens[child] == token]
        hits.append(bool(same))
        if all(firsts):
            firsts.append(same == children[:1])
        if not same:
            break
        at = same[0]
    return hits, firsts
