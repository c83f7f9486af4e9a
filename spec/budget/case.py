"""What the budget knows of one sequence that runs."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from spec.budget.found import NOTHING, Found
from spec.budget.members import Member, Record
from spec.budget.mixed import drafted_by
from spec.budget.ways import Grove, Offer
from spec.step import Verdict
from spec.tree import DraftTree

#: What is left of a step in the pace of a sequence after one more.
_PACE_KEPT = 0.8
#: The least of what a model's tree brings alone that it is taken to bring beside others.
_LEAST_BESIDE = 0.05


@dataclass(slots=True, eq=False)
class Case:
    """One sequence.

    length: of its text when found was; records: by member. tokens, seconds: expected of the step planned. tree: what is
    expected of the tree that a model was asked for in it; grown: what its nodes' chances add up to, since it is there,
    if no others stand beside them. came, spent: tokens and seconds of the last steps. others: nodes planned for the
    other sequences. looked: whether anything that was found is drafted. alone: steps in a row in which it was not, or
    hardly anything was expected of it.
    """

    records: dict[str, Record]
    found: Found = NOTHING
    length: int = -1
    tokens: float = 0.0
    seconds: float = 0.0
    tree: Grove | None = None
    grown: Grove | None = None
    came: float = 0.0
    spent: float = 0.0
    others: int = 0
    looked: bool = False
    alone: int = 0

    def see(self, record: Record, tree: DraftTree | None) -> None:
        """What one who looks things up found; None for nothing."""
        if tree is None:
            record.runs.went(0, ended=True)
            return
        if self.found is NOTHING:
            self.found = Found()
        self.found.add(record, tree)

    def pace(self, plain: float) -> float:
        """Tokens in a second of late; at least one in a step that takes ``plain``, as without drafts."""
        return max(self.came / self.spent if self.spent else 0.0, 1.0 / plain)

    def offer(self, models: Many[Member], levels: int, trees: bool) -> Offer:
        """What could be drafted, no deeper than ``levels``. trees: whether a model may be asked for others than chains
        of a given length."""
        chains, beside, grown = {}, {}, {}
        for name in (member.name for member in models if member.name in self.records):
            record = self.records[name]
            expected = record.expected(levels, trees)
            chains[name] = expected.chain
            if self.found.chances:
                beside[name] = record.behind_wrong(expected.chain)
            if expected.tree is not None:
                grown[name] = expected.tree
        return Offer(self.found.chances, self.found.first, chains, beside, grown)

    def nodes(self, levels: int) -> int:
        """About how many of a model's will be verified, that was asked for so many levels."""
        return round(self.tree.nodes) if levels and self.tree is not None else levels

    def share_beside(self, model: str) -> float:
        """How much of what its chances say a model's tree is expected to bring where others stand beside it."""
        expected = self.records[model].expected_tree
        if self.tree is None or not self.found.chances or expected is None or not expected.tokens:
            return 1.0
        return min(1.0, max(_LEAST_BESIDE, self.tree.tokens / expected.tokens))

    def kept(self, nodes: int, tokens: float, branches: bool) -> None:
        """Of a model's tree, which stands alone, so many nodes are verified, whose chances add up to these tokens."""
        self.grown = Grove(tokens, nodes, branches=branches)

    def learn(self, verdict: Verdict) -> list[str]:
        """See what was right of all that was proposed, verified or not; returns the models that began rightly."""
        tree, emitted = verdict.tree, verdict.emitted
        assert tree is not None, "whoever emits has a tree"
        current = self.length == len(verdict.work.sequence.tokens) - len(emitted)
        missed = current and self.found is not NOTHING and self.found.learn(emitted)
        for record in self.records.values():
            record.pursuit.saw(emitted)
        if current:
            self._stepped(len(emitted))
        if len(tree) == 1 and not tree.parts:
            return []
        models = [name for name, record in self.records.items() if not record.member.looks]
        right = []
        for part in tree.parts or (tree,):
            if part.drafter in models and len(part) > 1:
                record = self.records[part.drafter]
                grown = None
                if self.grown is not None and current and not verdict.forced:
                    grown = self.grown._replace(levels=drafted_by(part.drafter, tree)[0])
                hit = record.learn(part, emitted, verdict.accepted, current and self.tree is None, grown)
                if missed:
                    record.beside.saw(0, hit)
                right += [part.drafter] * hit
        return right

    def _stepped(self, tokens: int) -> None:
        """So many came of the step planned. Without found nodes what was expected of it counts: the rest is luck."""
        self.came = _PACE_KEPT * self.came + (tokens if self.looked else self.tokens)
        self.spent = _PACE_KEPT * self.spent + self.seconds
