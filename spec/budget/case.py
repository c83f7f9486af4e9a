"""What the budget knows of one sequence that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec.budget.found import Found
from spec.budget.members import Record

#: What is left of a step in the pace of a sequence after one more.
_PACE_KEPT = 0.8


@dataclass(slots=True, eq=False)
class Case:
    """One sequence. length: of its text when found was; records: by member. seconds: expected of the step planned;
    came, spent: tokens and seconds of the last steps."""

    records: dict[str, Record]
    found: Found = field(default_factory=Found)
    length: int = -1
    seconds: float = 0.0
    came: float = 0.0
    spent: float = 0.0

    def pace(self, plain: float) -> float:
        """Tokens in a second of late; at least one in a step that takes ``plain``, as without drafts."""
        return max(self.came / self.spent if self.spent else 0.0, 1.0 / plain)

    def stepped(self, tokens: int) -> None:
        """So many came of the step planned."""
        self.came = _PACE_KEPT * self.came + tokens
        self.spent = _PACE_KEPT * self.spent + self.seconds
