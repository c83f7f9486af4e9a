"""Who can be asked to draft, what is known of each, and what of each text.

::

    looks      proposes from the text alone, in microseconds: every step shows what it would say, and what was right
    models     by what their trees promise (their chances add up to that), how often their first level comes, and chains
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import NamedTuple

from foresay.spec.budget.chance import LEAST, Claims, Salts, claimed
from foresay.spec.budget.cost import DraftCost, Group, Parts
from foresay.spec.budget.weigh import Estimate, ExpectedTree
from foresay.spec.names import PREDICTION
from foresay.spec.protocols import CatchesUp, Chains, Checks, Drafter, LooksUp
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape, merge

#: The deepest that a model is asked to draft, and that a text that was looked up is followed.
MODEL_LEVELS, LOOKED_LEVELS = 12, 24
#: The tree that a model is asked for, grown as far as it is worth it.
OPEN = TreeShape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2))
#: A model that was not the best in so many steps is at rest.
RESTING = 100
#: What is expected of a tree before anybody knows, the chance of its first level, and as many trees as that counts: bad
#: luck in the first ones should not put a model to rest. How far one tree moves it at least.
GUESS, _FIRST, _TREES, _MOVED = ExpectedTree(1.0, 4.0, 2.0), 0.55, 4, 0.02
#: How unsure a model's claims are of many texts, which its calibration knows, and of one: as far as texts differ. More,
#: and three misses at a start put a model to rest for hundreds of steps.
_UNSURE = 0.03, 0.2
#: What is left of a step in the pace of a text after one more: the last ten count most, or one lucky step would make
#: time so dear that nothing is drafted behind it.
_PACE_KEPT = 0.9
#: As many plain steps a text begins with.
_BEGUN = 8.0
#: Which share of what it promises a model keeps where what was looked up is wrong: the two are mostly right together.
_BESIDE = 0.65


@dataclass(slots=True, eq=False)
class Member:
    """One drafter. levels: the most it drafts. cost: as measured; costs: as learnt. salts: what its claims were worth.
    brings: what its trees promised lately, first: for their first level. idle: steps since it was last the best."""

    drafter: Drafter
    looks: bool
    levels: int
    cost: DraftCost = field(default_factory=DraftCost)
    brings: ExpectedTree = GUESS
    first: float = _FIRST
    idle: int = 0
    costs: Group = field(init=False)
    salts: Salts = field(init=False)
    _trees: int = 0
    _chains: Chains | None = field(init=False, default=None)
    _catches_up: CatchesUp | None = field(init=False, default=None)
    _looks_up: LooksUp | None = field(init=False, default=None)
    _checks: Checks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.costs, self.salts = Parts().group(astuple(self.cost)), Salts() if self.looks else Salts(*_UNSURE)
        # Asked once: it takes longer than all that is asked of the drafter then.
        self._catches_up = self.drafter if isinstance(self.drafter, CatchesUp) else None
        self._looks_up = self.drafter if isinstance(self.drafter, LooksUp) else None
        self._chains = self.drafter if isinstance(self.drafter, Chains) else None
        self._checks = self.drafter if isinstance(self.drafter, Checks) else None

    @property
    def name(self) -> str:
        """What settings, requests and traces call it."""
        return self.drafter.name

    @property
    def checks(self) -> bool:
        """Whether it can go on from what others found."""
        return self._checks is not None and self._checks.checks

    def check(self, sequence: SequenceState, found: DraftTree) -> None:
        """Let it begin its next draft so."""
        assert self._checks is not None, "it was asked"
        self._checks.check(sequence, found)

    @property
    def resting(self) -> bool:
        """Whether it is asked so seldom that what was written need not be shown to it at once."""
        return not self.looks and self.idle > RESTING

    def rest(self, sequence: SequenceState) -> int:
        """Tokens that it has to catch up with, beside the last one, before it can draft."""
        return 0 if self._catches_up is None else max(0, self._catches_up.unread(sequence) - 1)

    def grows(self, tree: DraftTree) -> bool:
        """Whether the host decided after each of its levels: trees that grow, and all of a drafter without chains."""
        return self._chains is None or bool(tree.grown)

    def chain(self, sequence: SequenceState, claims: Claims) -> list[float]:
        """The chances of a chain's nodes; none where nobody knows them."""
        if self._chains is None:
            return []
        chances = self._chains.chain_chances(sequence, min(sequence.most_levels, self.levels))
        kept = claims.chance(chances[0]) / chances[0] if chances and chances[0] else 0.0
        return [min(1.0, kept * chance) for chance in chances]

    def tree(self, sequence: SequenceState, claims: Claims) -> ExpectedTree:
        """What its next tree brings."""
        tokens, nodes, deep = self.brings
        levels = min(sequence.most_levels, self.levels)
        return ExpectedTree(min(claims.chance(self.first) / self.first * tokens, levels), nodes, min(deep, levels))

    def saw(self, part: DraftTree, tree: DraftTree, accepted: int, claims: Claims) -> None:
        """A tree that it drafted was verified alone, so many nodes of it accepted. part: all that it drafted.

        Which of its nodes come is mostly luck, while what their chances add up to says nearly the same with less of it.
        """
        told, first = len(tree.chances) == len(tree), self.first
        if told:
            first = min(1.0, sum([c for c, p in zip(tree.chances, tree.parents, strict=True) if p == 0]))
        claims.saw(first, accepted > 0)
        if self.grows(part):
            self._trees += 1
            step = max(_MOVED, 1.0 / (_TREES + self._trees))
            new = sum(tree.chances[1:]) if told else accepted, len(tree) - 1, part.levels
            self.brings = ExpectedTree(*(old + step * (n - old) for old, n in zip(self.brings, new, strict=True)))
            self.first += step * ((first if told else accepted > 0) - self.first)

    def find(self, sequences: Sequence[SequenceState]) -> list[DraftTree | None]:
        """What looking up finds for each of them; None for nothing."""
        shapes = [_chain(min(self.levels, sequence.most_levels)) for sequence in sequences]
        if self._looks_up is not None:
            return self._looks_up.find(sequences, shapes)
        return [tree if len(tree) > 1 else None for tree in self.drafter.propose(sequences, shapes)]

    @classmethod
    def looking(cls, drafter: Drafter, levels: int = LOOKED_LEVELS) -> Member:
        """One that looks things up in the text, or in what the request brought along."""
        return cls(drafter, True, levels)

    @classmethod
    def model(cls, drafter: Drafter, cost: DraftCost, levels: int = MODEL_LEVELS) -> Member:
        """One that computes."""
        return cls(drafter, False, levels, cost)


class Found(NamedTuple):
    """What was looked up for a text. proposed: each draft as it was, and the claims of its drafter. tree: the likely
    nodes of all, with the chances they are believed to have; None for none. names: of those who have any."""

    proposed: Sequence[tuple[Claims, DraftTree]] = ()
    tree: DraftTree | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, proposed: Sequence[tuple[Claims, DraftTree]]) -> Found:
        """Of what was proposed."""
        likely = []
        for claims, chain in proposed:
            chances = [chance for chance in claims.chances(claimed(chain)) if chance >= LEAST]
            if chances:
                likely.append(chain.beginning(1 + len(chances), (1.0, *chances)))
        tree = merge(likely, MAX_NODES).tree if likely else None
        return cls(proposed, tree, tuple(chain.drafter for chain in likely))

    @property
    def chances(self) -> list[float]:
        """Of the nodes, likeliest first."""
        return [] if self.tree is None else sorted(self.tree.chances[1:], reverse=True)

    @property
    def first(self) -> float:
        """The chance that a node at depth 1 comes."""
        if self.tree is None:
            return 0.0
        return min(1.0, sum(c for c, p in zip(self.tree.chances, self.tree.parents, strict=True) if p == 0))

    def best(self, nodes: int) -> DraftTree:
        """So many of them, the likeliest."""
        assert self.tree is not None, "nothing was found"
        return merge([self.tree], nodes + 1).tree

    def learn(self, emitted: Sequence[int]) -> None:
        """What came says what was right."""
        for claims, chain in self.proposed:
            for claim, token, came in zip(claimed(chain), chain.tokens[1:], emitted, strict=False):
                claims.saw(claim, token == came)
                if token != came:
                    break


#: Of a step in which nobody found anything.
NOTHING = Found()


@dataclass(slots=True, eq=False)
class SequenceStats:
    """One text. members: that may draft for it, by name; claims: what theirs are worth in it. found: of the step
    planned; length: of the text then; seconds: expected of it, choosing included; looked: whether anything that was
    found is drafted in it. asked: how often models were asked only to be seen. came, spent: tokens and seconds of the
    last steps."""

    members: Mapping[str, Member]
    claims: Mapping[str, Claims]
    found: Found = NOTHING
    length: int = -1
    asked: int = 0
    seconds: float = 0.0
    looked: bool = False
    came: float = 0.0
    spent: float = 0.0

    @classmethod
    def begun(cls, sequence: SequenceState, members: Mapping[str, Member]) -> SequenceStats:
        """A new one. What a request predicts itself is drafted whatever it says of others."""
        allowed = {n: m for n, m in members.items() if n != PREDICTION and sequence.draft_method in ("", n)}
        if sequence.prediction and PREDICTION in members:
            allowed[PREDICTION] = members[PREDICTION]
        return cls(allowed, {name: member.salts.claims(sequence.salt) for name, member in allowed.items()})

    def pace(self, plain: float) -> float:
        """Tokens in a second of late; at least one in a step that takes ``plain``, as without drafts, as which it also
        begins: one lucky step is no pace."""
        if not self.spent:
            self.came, self.spent = _BEGUN, _BEGUN * plain
        return max(self.came / self.spent, 1.0 / plain)

    def estimate(self, sequence: SequenceState) -> Estimate:
        """What could be drafted for it."""
        models = [(name, self.claims[name], of) for name, of in self.members.items() if not of.looks]
        trees = {name: of.tree(sequence, claims) for name, claims, of in models}
        chains = {name: of.chain(sequence, claims) for name, claims, of in models}
        return Estimate(self.found.chances, trees, _BESIDE * (1.0 - self.found.first), chains)

    def learn(self, result: VerifyResult) -> None:
        """See what was right of all that was proposed, verified or not."""
        emitted, tree = result.emitted, result.tree
        assert tree is not None, "a text that goes on has a tree"
        if self.length == len(result.scheduled.sequence.tokens) - len(emitted):  # else it was planned for another step
            self.found.learn(emitted)
            self.came = _PACE_KEPT * self.came + len(emitted)
            self.spent = _PACE_KEPT * self.spent + self.seconds
        if not result.forced and not any(share.tree is not None for share in result.scheduled.plan.shares):
            for part in tree.parts or (tree,):
                if part.drafter in self.members and len(part) > 1:
                    self.members[part.drafter].saw(part, tree, result.accepted, self.claims[part.drafter])


#: The shape of a chain, made once.
_chain = lru_cache(TreeShape.chain)
