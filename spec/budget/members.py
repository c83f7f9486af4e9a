"""Who can be asked to draft, and what is known of each: what it costs, and how often it is right.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
               (:mod:`foresay.spec.budget.claims`)
    models     by what their trees promise and how much of it comes (:class:`Promises`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from foresay.spec.budget.claims import Salts
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.weigh import ExpectedTree
from foresay.spec.protocols import CatchesUp, Chains, Drafter, LooksUp
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: The tree that a model is asked for, grown as far as it is worth it.
OPEN = TreeShape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2))
#: A model that was not the best in so many steps is at rest.
RESTING = 100
#: What is expected of a tree before anybody knows, and as many trees as that counts: bad luck in the first ones should
#: not put a model to rest.
_GUESS, _TREES = ExpectedTree(1.0, 4.0, 2.0), 4
#: How far one tree moves what is expected of the next; farther in the beginning.
_MOVED = 0.02
#: As many promised tokens, all kept, as what is believed in the beginning counts; and what is left of a tree's after
#: one more.
_BELIEVED, _LEFT = 8.0, 0.995


class Promises:
    """What a model's trees bring that grow by their chances. brings: what those promised lately.

    Which of its nodes come is mostly luck, while what their chances add up to says nearly the same with less of it. So
    that is remembered, and how much of it is kept.
    """

    def __init__(self) -> None:
        self.brings, self._trees = _GUESS, 0
        self._came = self._promised = 0.0

    @property
    def kept(self) -> float:
        """Of what is promised, the share that comes."""
        return (self._came + _BELIEVED) / (self._promised + _BELIEVED)

    def expected(self, levels: int) -> ExpectedTree:
        """Of the next tree, if it may have so many levels."""
        tokens, nodes, deep = self.brings
        return ExpectedTree(min(self.kept * tokens, levels), nodes, min(deep, levels))

    def saw(self, expected: ExpectedTree, came: int, chain: bool = False) -> None:
        """A tree was drafted whose nodes' chances add up to these tokens, and so many of them came. chain: it was one,
        and says nothing of what trees bring that grow."""
        if not chain:
            self._trees += 1
            step = max(_MOVED, 1.0 / (_TREES + self._trees))
            pairs = zip(self.brings, expected, strict=True)
            self.brings = ExpectedTree(*(old + step * (new - old) for old, new in pairs))
        self._came = _LEFT * self._came + came
        self._promised = _LEFT * self._promised + expected.tokens


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. salts: what was shown of the claims of one that looks things up.
    promises: of a model. idle: steps since it was last taken for the best, if only to be seen.

    chain_cost: of a model's chains, which are drafted without a stop; that of all its trees where it does not say how
    often chains come."""

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    salts: Salts = field(default_factory=Salts)
    promises: Promises = field(default_factory=Promises)
    idle: int = 0
    chain_cost: DraftCost = field(init=False)
    _chains: Chains | None = field(init=False, default=None)
    _catches_up: CatchesUp | None = field(init=False, default=None)
    _looks_up: LooksUp | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Asked once: it takes longer than all that is asked of the drafter then.
        self._catches_up = self.drafter if isinstance(self.drafter, CatchesUp) else None
        self._looks_up = self.drafter if isinstance(self.drafter, LooksUp) else None
        self._chains = self.drafter if isinstance(self.drafter, Chains) else None
        self.chain_cost = self.cost if self._chains is None else replace(self.cost, deciding=0.0)

    @property
    def name(self) -> str:
        """What settings, requests and traces call it."""
        return self.drafter.name

    @property
    def resting(self) -> bool:
        """Whether it is asked so seldom that what was written need not be shown to it at once."""
        return not self.looks and self.idle > RESTING

    def rest(self, sequence: SequenceState) -> int:
        """Tokens that it has to catch up with, beside the last one, before it can draft."""
        return 0 if self._catches_up is None else max(0, self._catches_up.unread(sequence) - 1)

    def costs(self, chain: bool) -> DraftCost:
        """Of its chains, or of trees that grow."""
        return self.chain_cost if chain else self.cost

    def slowed(self, factor: float) -> None:
        """All that it drafts takes so many times as long as before."""
        for cost in (self.cost, self.chain_cost)[: 1 + (self._chains is not None)]:
            cost.slower *= factor

    def chain(self, sequence: SequenceState) -> list[float]:
        """The chances of a chain's nodes; none where nobody knows them."""
        if self._chains is None:
            return []
        kept = self.promises.kept
        chances = self._chains.chain_chances(sequence, min(sequence.most_levels, self.levels))
        return [min(1.0, kept * chance) for chance in chances]

    def saw(self, tree: DraftTree, expected: ExpectedTree, came: int) -> None:
        """See :meth:`Promises.saw`."""
        self.promises.saw(expected, came, chain=self._chains is not None and not tree.grown)

    def find(self, sequences: Sequence[SequenceState]) -> list[DraftTree | None]:
        """What looking up finds for each of them; None for nothing."""
        shapes = [_chain(min(self.levels, sequence.most_levels)) for sequence in sequences]
        if self._looks_up is not None:
            return self._looks_up.find(sequences, shapes)
        trees = self.drafter.propose(sequences, shapes)
        return [tree if len(tree) > 1 else None for tree in trees]

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
