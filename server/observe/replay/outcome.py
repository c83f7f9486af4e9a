"""What a way of drafting would have done in a trace, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Counts over the steps that were judged. sizes: steps by (drafted nodes, levels). seconds: spent drafting, where
    that was done again. short: steps whose recorded tree had fewer levels or nodes than were asked for, so that the
    accepted tokens may be too few.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float | None = None
    short: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the accepted tokens and the target's own."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def drafts(self) -> int:
        """Steps that drafted anything."""
        return sum(times for (drafted, _), times in self.sizes.items() if drafted)

    def count(self, drafted: int, levels: int, accepted: int) -> None:
        """One step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.sizes[drafted, levels] += 1
        self.accepted_per_depth.extend([0] * (accepted - len(self.accepted_per_depth)))
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1
