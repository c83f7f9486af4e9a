"""What the budget knows of the sequences that run, and what whoever looks things up finds for them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from spec.budget.found import NOTHING, Found, Looking
from spec.budget.members import Member
from spec.budget.mixed import levels_of, shares_of
from spec.budget.promises import Share
from spec.budget.weigh import Grove, Offer
from spec.names import PREDICTION
from spec.sequence import Sequence
from spec.step import Verdict
from spec.tree import DraftTree

#: What is left of a step in the pace of a sequence after one more.
_PACE_KEPT = 0.8


@dataclass(slots=True, eq=False)
class Case:
    """One sequence.

    looking, models: what it showed, by member. found: of the step planned; length: of the text then; seconds: expected
    of it; looked: whether anything that was found is drafted in it. came, spent: tokens and seconds of the last steps.
    """

    looking: dict[str, Looking]
    models: dict[str, tuple[Member, Share]]
    found: Found = NOTHING
    length: int = -1
    seconds: float = 0.0
    looked: bool = False
    came: float = 0.0
    spent: float = 0.0

    def pace(self, plain: float) -> float:
        """Tokens in a second of late; at least one in a step that takes ``plain``, as without drafts."""
        return max(self.came / self.spent if self.spent else 0.0, 1.0 / plain)

    def offer(self, levels: int) -> Offer:
        """What could be drafted, no deeper than ``levels``."""
        trees = {name: of.promises.expected(own, min(levels, of.levels)) for name, (of, own) in self.models.items()}
        missed = 1.0 - self.found.first
        beside = {name: missed * of.beside.hope for name, (of, _) in self.models.items()}
        return Offer(self.found.chances, trees, beside)

    def learn(self, verdict: Verdict) -> None:
        """See what was right of all that was proposed, verified or not."""
        emitted, tree = verdict.emitted, verdict.tree
        assert tree is not None, "whoever emits has a tree"
        current = self.length == len(verdict.work.sequence.tokens) - len(emitted)
        missed = current and self.found is not NOTHING and self.found.learn(emitted)
        for looking in self.looking.values():
            looking.pursuit.saw(emitted)
        if current:
            self.came = _PACE_KEPT * self.came + len(emitted)
            self.spent = _PACE_KEPT * self.spent + self.seconds
        for part in (tree.parts or (tree,)) if not verdict.forced else ():
            if part.drafter in self.models and len(part) > 1:
                self._drafted(*self.models[part.drafter], part, verdict, missed)

    def _drafted(self, member: Member, own: Share, part: DraftTree, verdict: Verdict, missed: bool) -> None:
        """What a model drafted; missed: what was found was wrong."""
        if missed:
            came = part.accepted(verdict.emitted)
            member.beside.saw(came, sum(part.chances[1:]) or came)
        tree = verdict.tree
        if tree is not None and not any(share.tree is not None for share in shares_of(verdict.work.shape)):
            promised = sum(tree.chances[1:]) if len(tree.chances) == len(tree) else verdict.accepted
            member.promises.saw(own, Grove(promised, len(tree) - 1, levels_of(part)), verdict.accepted)


class Cases:
    """Owns what is known of each sequence, by its id."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._of: dict[str, Case] = {}

    def known(self, id: str) -> Case | None:
        """Of a sequence for which something was planned already."""
        return self._of.get(id)

    def ended(self, id: str) -> None:
        """Forget a sequence."""
        self._of.pop(id, None)

    def look(self, able: Many[Sequence], looks: bool = True) -> list[Case]:
        """Ask whoever looks things up, for each of these; without ``looks`` nobody is asked and nothing found."""
        cases = [self._of.get(sequence.id) or self._begun(sequence) for sequence in able]
        for sequence, case in zip(able, cases, strict=True):
            case.found, case.length = NOTHING, len(sequence.tokens)
        for name, member in self._members.items() if looks else ():
            asked = [pair for pair in zip(able, cases, strict=True) if name in pair[1].looking]
            if asked:
                for (_, case), tree in zip(asked, member.find([sequence for sequence, _ in asked]), strict=True):
                    case.found = case.found.plus(case.looking[name], tree)
        return cases

    def _begun(self, sequence: Sequence) -> Case:
        members = self._allowed(sequence)
        looking = {m.name: Looking(m.salts.claims(sequence.salt)) for m in members if m.looks}
        models = {m.name: (m, m.promises.own()) for m in members if not m.looks}
        case = self._of[sequence.id] = Case(looking, models)
        return case

    def _allowed(self, sequence: Sequence) -> list[Member]:
        """Who may draft; what a request predicts itself is drafted whatever it says of others."""
        members = self._members
        named = [m for m in members.values() if m.name != PREDICTION and sequence.draft_method in ("", m.name)]
        return named + ([members[PREDICTION]] if sequence.prediction and PREDICTION in members else [])
