"""The drafters of a budget, and statistics of each and of each text.

::

    looks      proposes from the text alone, in microseconds: each step shows its proposals and which were correct
    models     known by the sum of their trees' chances, how often their first level is accepted, and chains
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from foresay.spec.budget.chance import MANY, TEXT, Claims, Salts, claimed
from foresay.spec.budget.cost import DraftCost, DraftCosts, Pace
from foresay.spec.budget.weigh import Chances, ExpectedTree
from foresay.spec.names import PREDICTION
from foresay.spec.protocols import CatchesUp, Chains, Checks, Drafter, LooksUp
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape, merge

#: The most levels drafted by a model, and by a lookup.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: The tree of a model, which grows as long as that is worth it.
OPEN = TreeShape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2))
#: A model that was not the best for so many steps rests.
RESTING = 100
#: Priors: the expected tree, and the chance of its first level; as how many trees they count, so that bad luck in the
#: first ones does not make a model rest, and the least weight of a new tree.
GUESS, _FIRST = ExpectedTree(1.0, 4.0, 2.0), 0.55
_TREES, _MOVED = 4, 0.02
#: As how many outcomes a model's claims count over many texts, for which it is calibrated; and as how many accepted
#: nodes that its trees bring what their chances add up to. With each chain half as much of what trees showed is
#: forgotten as with a tree: else trees that lost to chains would never be tried again.
_CALIBRATED, _AS_CLAIMED = 3 * MANY[0], 2 * MANY[0]
#: How much of a step's weight in a text's pace remains after one more step: the last ten count most.
_PACE_KEPT = 0.9
#: The share of a tree's tokens that remains next to found nodes, beside their own: both are mostly right at once.
_NEXT_TO_HITS = 0.65


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. cost: as measured; costs: as learnt. salts: the accuracy of its claims.
    brings: the recent average of its trees, first: of their first level's chance; came, claimed: how many of their
    nodes were accepted lately, and should have been. idle: steps since it was best. tries: how often it was asked.
    saved: seconds that it may lose in a try."""

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    brings: ExpectedTree = GUESS
    first: float = _FIRST
    came: float = _AS_CLAIMED
    claimed: float = _AS_CLAIMED
    idle: int = 0
    tries: int = 0
    saved: float = 0.0
    costs: DraftCosts = field(init=False)
    salts: Salts = field(init=False)
    _trees: int = _TREES
    _chains: Chains | None = field(init=False, default=None)
    _catches_up: CatchesUp | None = field(init=False, default=None)
    _looks_up: LooksUp | None = field(init=False, default=None)
    _checks: Checks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.costs, self.salts = DraftCosts(self.cost, Pace()), Salts() if self.looks else Salts(_CALIBRATED)
        # Checked once: that takes longer than the calls do.
        self._catches_up = self.drafter if isinstance(self.drafter, CatchesUp) else None
        self._looks_up = self.drafter if isinstance(self.drafter, LooksUp) else None
        self._chains = self.drafter if isinstance(self.drafter, Chains) else None
        self._checks = self.drafter if isinstance(self.drafter, Checks) else None

    @classmethod
    def looking(cls, drafter: Drafter, levels: int = LOOKED_LEVELS) -> Member:
        """A lookup: it proposes from the text, or from what the request supplies."""
        return cls(drafter, True, levels)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """A drafter that computes."""
        return cls(drafter, False, levels, cost)

    @property
    def name(self) -> str:
        """Its name in settings, requests and traces."""
        return self.drafter.name

    @property
    def checks(self) -> bool:
        """Whether it can continue from what others found."""
        return self._checks is not None and self._checks.checks

    def check(self, sequence: SequenceState, found: DraftTree) -> None:
        """Let its next draft start from what was found."""
        assert self._checks is not None, "see checks"
        self._checks.check(sequence, found)

    @property
    def resting(self) -> bool:
        """Whether it drafts so rarely that committed tokens need not be passed to it at once."""
        return not self.looks and self.idle > RESTING

    def behind(self, sequence: SequenceState) -> int:
        """Tokens that it has to catch up with, besides the last one, before it can draft."""
        return 0 if self._catches_up is None else max(0, self._catches_up.unread(sequence) - 1)

    def grows(self, tree: DraftTree) -> bool:
        """Whether the host decided after each of its levels: trees that grow, and all of a drafter without chains."""
        return self._chains is None or bool(tree.grown)

    def chain(self, sequence: SequenceState, claims: Claims) -> list[float]:
        """The chances of a chain's nodes; none where they are unknown."""
        if self._chains is None:
            return []
        chances = self._chains.chain_chances(sequence, min(sequence.most_levels, self.levels))
        kept = claims.hope(chances[0]) / chances[0] if chances and chances[0] else 0.0
        return [min(1.0, kept * chance) for chance in chances]

    def tree(self, sequence: SequenceState, claims: Claims) -> ExpectedTree:
        """The expected next tree."""
        tokens, nodes, deep = self.brings
        levels = min(sequence.most_levels, self.levels)
        tokens *= claims.hope(self.first) / self.first * self.came / self.claimed
        return ExpectedTree(min(tokens, levels), nodes, min(deep, levels))

    def saw(self, part: DraftTree, tree: DraftTree, accepted: int, claims: Claims) -> None:
        """Learn from a tree of its own, verified without nodes of others. accepted: nodes. part: all that it drafted.

        Which of its nodes are accepted is mostly luck, while the sum of their chances says nearly the same with less.
        """
        first, brings, grows = self.first, float(accepted), self.grows(part)
        if known := len(tree.chances) == len(tree):
            first, brings = _below_root(tree), sum(tree.chances[1:])
            expected, forgotten = brings * claims.chance(first) / (first or 1.0), _MOVED if grows else _MOVED / 2
            self.came += grows * accepted - forgotten * (self.came - _AS_CLAIMED)
            self.claimed += grows * expected - forgotten * (self.claimed - _AS_CLAIMED)
        claims.saw(first, accepted > 0)
        if grows:
            self._trees += 1
            step, new = max(_MOVED, 1.0 / self._trees), (brings, len(tree) - 1, part.levels)
            self.brings = ExpectedTree(*(old + step * (n - old) for old, n in zip(self.brings, new, strict=True)))
            self.first += step * ((first if known else accepted > 0) - self.first)

    def find(self, sequences: Sequence[SequenceState]) -> list[DraftTree | None]:
        """What a lookup finds for each of them; None for nothing."""
        shapes = [_chain(min(self.levels, sequence.most_levels)) for sequence in sequences]
        if self._looks_up is not None:
            return self._looks_up.find(sequences, shapes)
        return [tree if len(tree) > 1 else None for tree in self.drafter.propose(sequences, shapes)]


class Found(NamedTuple):
    """What was looked up for a text. proposed: each original draft, and the claims of its drafter. tree: the likely
    nodes of all, with their estimated chances; None for none. names: the drafters that have any."""

    proposed: Sequence[tuple[Claims, DraftTree]] = ()
    tree: DraftTree | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, proposed: Sequence[tuple[Claims, DraftTree]]) -> Found:
        """Merge proposals."""
        likely = []
        for claims, chain in proposed:
            if chances := claims.chances(claimed(chain)):
                likely.append(chain.beginning(1 + len(chances), (1.0, *chances)))
        tree = likely[0] if len(likely) == 1 else merge(likely, MAX_NODES) if likely else None
        return cls(proposed, tree, tuple(chain.drafter for chain in likely))

    @property
    def chances(self) -> list[float]:
        """The chances of the nodes, likeliest first."""
        return [] if self.tree is None else sorted(self.tree.chances[1:], reverse=True)

    @property
    def left(self) -> float:
        """The share of the tokens of a model's tree that remains next to it."""
        return 1.0 if self.tree is None else _NEXT_TO_HITS * (1.0 - _below_root(self.tree))

    def best(self, nodes: int) -> DraftTree:
        """A tree of so many of the likeliest nodes."""
        assert self.tree is not None, "nothing was found"
        if self.tree.is_chain:
            return self.tree.beginning(nodes + 1, self.tree.chances[: nodes + 1], self.tree.sources[: nodes + 1])
        return merge([self.tree], nodes + 1)

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the emitted tokens which nodes were correct."""
        for claims, chain in self.proposed:
            for claim, token, came in zip(claimed(chain), chain.tokens[1:], emitted, strict=False):
                claims.saw(claim, token == came)
                if token != came:
                    break


#: Of a step in which nothing was found.
NOTHING = Found()


@dataclass(slots=True, eq=False)
class TextStats:
    """What is known of one text. members: its possible drafters, by name; claims: of each. found: what was looked up
    last; length: of the text then, until it is learnt from. came, spent: tokens and seconds of the last steps."""

    members: Mapping[str, Member]
    claims: Mapping[str, Claims]
    found: Found = NOTHING
    length: int = -1
    came: float = TEXT[0]
    spent: float = 0.0

    @classmethod
    def begun(cls, sequence: SequenceState, members: Iterable[Member]) -> TextStats:
        """For a new text. The request's own prediction may always draft, whatever its draft method."""
        allowed = {
            member.name: member
            for member in members
            if (sequence.prediction if member.name == PREDICTION else sequence.draft_method in ("", member.name))
        }
        kind = sequence.sampling.kind
        return cls(allowed, {name: one.salts.claims(sequence.salt, kind) for name, one in allowed.items()})

    def pace(self, plain: float) -> float:
        """Recent tokens a second; at least one per step that takes ``plain``, as without drafts. It also starts there,
        so that one lucky step sets no pace."""
        self.spent = self.spent or self.came * plain
        return max(self.came / self.spent, 1.0 / plain)

    def expected(self, sequence: SequenceState) -> dict[str, tuple[ExpectedTree, Chances]]:
        """The tree and the chain that each model may draft for it."""
        models = [(name, of, self.claims[name]) for name, of in self.members.items() if not of.looks]
        return {name: (of.tree(sequence, claims), of.chain(sequence, claims)) for name, of, claims in models}

    def learn(self, result: VerifyResult, seconds: float) -> None:
        """Learn from all that was proposed, verified or not. seconds: that the step was to take; 0 if unknown."""
        emitted, tree, shares = result.emitted, result.tree, result.scheduled.plan.shares
        assert tree is not None, "a text that goes on has a tree"
        if seconds and self.spent:  # else no pace was asked for yet
            self.came = _PACE_KEPT * self.came + len(emitted)
            self.spent = _PACE_KEPT * self.spent + seconds
        if self.length == len(result.scheduled.sequence.tokens) - len(emitted):  # else looked up for another step
            self.found.learn(emitted)
        self.length = -1
        if not result.forced and not any(share.tree is not None for share in shares):
            for share in shares if len(tree) == 1 else ():  # asked, and nothing came: as good as a wrong draft
                self.claims[share.drafter].saw(1.0, came=False)
            for part in tree.parts or (tree,):
                if part.drafter in self.members and len(part) > 1:
                    self.members[part.drafter].saw(part, tree, result.accepted, self.claims[part.drafter])


def _below_root(tree: DraftTree) -> float:
    """The chance that a node at depth 1 is accepted."""
    return min(1.0, sum([c for c, p in zip(tree.chances, tree.parents, strict=True) if p == 0]))


#: The shape of a chain, made once.
_chain = lru_cache(TreeShape.chain)
