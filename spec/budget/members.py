"""Who can be asked to draft, and what is known of each: what it costs, and how often it is right.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
               (:mod:`spec.budget.claims`)
    models     by what their trees promise and how much of it comes (:mod:`spec.budget.promises`); and apart where what
               was looked up is wrong, since both are often right together
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache

from spec.budget.claims import Salts
from spec.budget.cost import DraftCost
from spec.budget.promises import Promises, Share
from spec.protocols import CatchesUp, Drafter, LooksUp
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: The tree that a model is asked for, grown as far as it is worth it.
OPEN = TreeShape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2))
#: Which share of what it promises a model keeps where what was looked up is wrong, before anybody knows; as many
#: promised tokens as that counts.
_BESIDE, _GUESSED = 0.65, 4.0
#: What is left of earlier steps in how often a member was asked, after one more.
_REMEMBERED = 0.99


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. salts: what was shown of the claims of one that looks things up.
    promises, beside: of a model. asked: how often it takes part lately."""

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    salts: Salts = field(default_factory=Salts)
    promises: Promises = field(default_factory=Promises)
    beside: Share = field(default_factory=lambda: Share(_BESIDE, _GUESSED))
    asked: float = 1.0
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

    def took_part(self, part: bool) -> None:
        """Whether it drafts in a step."""
        self.asked = _REMEMBERED * self.asked + (1 - _REMEMBERED) * part

    @classmethod
    def looking(cls, drafter: Drafter, levels: int = LOOKED_LEVELS) -> Member:
        """One that looks things up in the text, or in what the request brought along."""
        return cls(drafter, True, levels)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """One that computes."""
        return cls(drafter, False, levels, cost)


#: The shape of a chain, made once.
_chain = lru_cache(TreeShape.chain)
