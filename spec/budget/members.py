"""Who can be asked to draft, and what is known of each: cost, and how often it is right in which situation.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
      claims     its own chance of each node, in bins: how often that many come true
      runs       one that claims nothing: by how many tokens in a row it has been right by now, drafted ones included
    models     by depth; and at depth 1 apart where what was looked up is wrong, since both are often right together
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from spec.budget.cost import DraftCost
from spec.budget.rates import OwnRates, Rates
from spec.protocols import Drafter
from spec.sequence import Sequence
from spec.tree import DraftTree

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: What a model is taken to be right in before anybody knows: alone, and where what was looked up is wrong.
_MODEL_GUESS, _BESIDE_GUESS = 0.6, 0.4
_CLAIM_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_CLAIM_GUESSES = (0.05, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98)
_RUN_EDGES = (1, 2, 3, 5, 9, 17)
_RUN_GUESSES = (0.15, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. rates: of all sequences; beside: see the module. asked: how often it was
    lately asked, of the steps that might have."""

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    rates: Rates = field(default_factory=lambda: Rates(_CLAIM_GUESSES + _RUN_GUESSES))
    beside: Rates = field(default_factory=lambda: Rates([_BESIDE_GUESS]))
    asked: float = 1.0

    @property
    def name(self) -> str:
        """What settings, requests and traces call it."""
        return self.drafter.name

    @classmethod
    def looking(cls, drafter: Drafter) -> Member:
        """One that looks things up in the text."""
        return cls(drafter, True, LOOKED_LEVELS)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """One that computes."""
        return cls(drafter, False, levels, cost, Rates([_MODEL_GUESS] * levels, chained=True))


@dataclass(slots=True, eq=False)
class Record:
    """What one sequence has shown of one member. run: tokens in a row that it has been right on by now. drafted_at: the
    length of the text when it last drafted."""

    member: Member
    rates: OwnRates
    beside: OwnRates
    run: int = 0
    drafted_at: int = 0

    @classmethod
    def of(cls, member: Member, sequence: Sequence) -> Record:
        """Nothing yet."""
        return cls(member, OwnRates(member.rates), OwnRates(member.beside), drafted_at=len(sequence.tokens))

    def chain(self, levels: int) -> list[float]:
        """The chance of each node of a model's chain."""
        chances, chance = [], 1.0
        for depth in range(min(levels, self.member.levels)):
            chance *= self.rates.chance(depth)
            chances.append(chance)
        return chances

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
