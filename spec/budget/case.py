"""What the budget knows of the sequences that run, and what whoever looks things up finds for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spec.budget.claims import Claims
from spec.budget.found import NOTHING, Found
from spec.budget.members import Member
from spec.budget.plan import levels_of
from spec.budget.weigh import Estimate, ExpectedTree
from spec.names import PREDICTION
from spec.sequence import SequenceState
from spec.step import VerifyResult
from spec.tree import DraftTree

#: What is left of a step in the pace of a sequence after one more: the last five count most.
_PACE_KEPT = 0.8
#: Which share of what it promises a model keeps where what was looked up is wrong: the two are mostly right together.
_BESIDE = 0.65


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

    def estimate(self, levels: int) -> Estimate:
        """What could be drafted, no deeper than ``levels``."""
        trees = {name: of.promises.expected(min(levels, of.levels)) for name, of in self.models.items()}
        return Estimate(self.found.chances, trees, _BESIDE * (1.0 - self.found.first))

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
                    self.models[part.drafter].promises.saw(expected, result.accepted)


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
