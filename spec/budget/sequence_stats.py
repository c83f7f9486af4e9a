"""What the budget knows of a sequence that runs, and what looking things up found for it, with the chances that such
nodes have had so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foresay.spec.budget.claims import LEAST, Claims, claimed
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import levels_of
from foresay.spec.budget.weigh import Estimate, ExpectedTree
from foresay.spec.merge import merge
from foresay.spec.names import PREDICTION
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.tree import MAX_NODES, DraftTree

#: What is left of a step in the pace of a sequence after one more: the last five count most.
_PACE_KEPT = 0.8
#: Which share of what it promises a model keeps where what was looked up is wrong: the two are mostly right together.
_BESIDE = 0.65


@dataclass(frozen=True, slots=True)
class Found:
    """The chains of all who look things up. proposed: each as it was, and what is known of whose it is. tree: the
    likely nodes of all, with the chances they are believed to have; None for none. names: of those who have any.
    """

    proposed: Sequence[tuple[Claims, DraftTree]] = ()
    tree: DraftTree | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, proposed: Sequence[tuple[Claims, DraftTree]]) -> Found:
        """Of what was proposed."""
        likely = [chain for one in proposed if len(chain := _believed(*one)) > 1]
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
        assert self.tree is not None, "whoever takes of it has found something"
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
    """One sequence.

    claims: what it showed, by lookup. models: that may draft for it, by name. found: of the step planned; length: of
    the text then; seconds: expected of it; looked: whether anything that was found is drafted in it. came, spent:
    tokens and seconds of the last steps.
    """

    claims: dict[str, Claims]
    models: dict[str, Member]
    found: Found = NOTHING
    length: int = -1
    seconds: float = 0.0
    looked: bool = False
    came: float = 0.0
    spent: float = 0.0

    def pace(self, plain: float) -> float:
        """Tokens in a second of late; at least one in a step that takes ``plain``, as without drafts."""
        return max(self.came / self.spent if self.spent else 0.0, 1.0 / plain)

    def estimate(self, sequence: SequenceState) -> Estimate:
        """What could be drafted for it."""
        levels, chains = sequence.most_levels, {name: of.chain(sequence) for name, of in self.models.items()}
        trees = {name: of.promises.expected(min(levels, of.levels)) for name, of in self.models.items()}
        return Estimate(self.found.chances, trees, _BESIDE * (1.0 - self.found.first), chains)

    def learn(self, result: VerifyResult) -> None:
        """See what was right of all that was proposed, verified or not."""
        emitted, tree = result.emitted, result.tree
        assert tree is not None, "whoever emits has a tree"
        if self.length == len(result.scheduled.sequence.tokens) - len(emitted):  # else it was planned for another step
            self.found.learn(emitted)
            self.came = _PACE_KEPT * self.came + len(emitted)
            self.spent = _PACE_KEPT * self.spent + self.seconds
        if not result.forced and not any(share.tree is not None for share in result.scheduled.plan.shares):
            for part in tree.parts or (tree,):
                if part.drafter in self.models and len(part) > 1:
                    promised = sum(tree.chances[1:]) if len(tree.chances) == len(tree) else result.accepted
                    expected = ExpectedTree(promised, len(tree) - 1, levels_of(part))
                    self.models[part.drafter].saw(part, expected, result.accepted)


def begun(sequence: SequenceState, members: Mapping[str, Member]) -> SequenceStats:
    """A new one: who may draft for it. What a request predicts itself is drafted whatever it says of others."""
    allowed = [m for m in members.values() if m.name != PREDICTION and sequence.draft_method in ("", m.name)]
    if sequence.prediction and PREDICTION in members:
        allowed.append(members[PREDICTION])
    claims = {m.name: m.salts.claims(sequence.salt) for m in allowed if m.looks}
    return SequenceStats(claims, {m.name: m for m in allowed if not m.looks})


def look(able: Sequence[SequenceState], cases: Sequence[SequenceStats], members: Sequence[Member]) -> None:
    """Ask those of these members who look things up, for each of the sequences."""
    proposed: list[list[tuple[Claims, DraftTree]]] = [[] for _ in cases]
    for member in members:
        asked = [index for index, case in enumerate(cases) if member.name in case.claims]
        for index, chain in zip(asked, member.find([able[index] for index in asked]) if asked else (), strict=True):
            if chain is not None:
                proposed[index].append((cases[index].claims[member.name], chain))
    for sequence, case, chains in zip(able, cases, proposed, strict=True):
        case.found, case.length = Found.of(chains) if chains else NOTHING, len(sequence.tokens)


def _believed(claims: Claims, chain: DraftTree) -> DraftTree:
    """The nodes of a proposal that are likely enough, with their chances."""
    likely = [chance for chance in claims.chances(claimed(chain)) if chance >= LEAST]
    return chain.beginning(1 + len(likely), (1.0, *likely))
