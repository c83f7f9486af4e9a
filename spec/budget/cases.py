"""The sequences that run, and what whoever looks things up finds for them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from spec.budget.case import Case
from spec.budget.found import NOTHING
from spec.budget.members import Member, Record
from spec.names import PREDICTION
from spec.sequence import Sequence


class Cases:
    """Owns what is known of each sequence, by its id."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._looking = [(name, member) for name, member in members.items() if member.looks]
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
        for name, member in self._looking if looks else ():
            asked = [pair for pair in zip(able, cases, strict=True) if name in pair[1].records]
            if asked:
                for (_, case), tree in zip(asked, member.find([sequence for sequence, _ in asked]), strict=True):
                    case.see(case.records[name], tree)
        return cases

    def _begun(self, sequence: Sequence) -> Case:
        case = self._of[sequence.id] = Case({m.name: Record.of(m, sequence) for m in self._allowed(sequence)})
        return case

    def _allowed(self, sequence: Sequence) -> list[Member]:
        """Who may draft; what a request predicts itself is drafted whatever it says of others."""
        members = self._members
        named = [m for m in members.values() if m.name != PREDICTION and sequence.draft_method in ("", m.name)]
        return named + ([members[PREDICTION]] if sequence.prediction and PREDICTION in members else [])
