"""What a shadow drafter would have had accepted."""

from __future__ import annotations

from typing import Self

from server.observe.telemetry.drafting import Drafting
from spec.trace import ShadowReport


class Shadowing:
    """One shadow's steps as they would have been. tokens: what they would have emitted; seconds: what drafting took."""

    __slots__ = ("drafting", "seconds", "steps", "tokens")

    def __init__(self) -> None:
        self.drafting = Drafting()
        self.tokens = self.steps = 0
        self.seconds = 0.0

    def count(self, report: ShadowReport) -> None:
        """A request that is over."""
        self.tokens += report.tokens
        self.steps += report.steps
        self.seconds += report.seconds
        self.drafting.sum(
            report.drafts, report.drafted, report.accepted, report.drafted_per_depth, report.accepted_per_depth
        )

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.drafting.add(other.drafting)
