"""From texts that were written twice to numbers: speed-up, acceptance by depth, whether both are the same."""

from __future__ import annotations

import statistics as averages
from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.checks.report import Measured
from spec.acceptance import ByDepth, by_place, tokens_per_step
from spec.trace import Statistics

#: Texts shorter than this say nothing about speed, unless all are.
_SHORT = 8


@dataclass(frozen=True, slots=True)
class Written:
    """One finished text."""

    tokens: list[int]
    statistics: Statistics

    @property
    def speed(self) -> float:
        """Tokens per second after the first."""
        return max(self.statistics.decode_tokens_per_second, 1e-9)


@dataclass(frozen=True, slots=True)
class Twice:
    """One text, written with the drafter and without."""

    drafted: Written
    plain: Written

    @property
    def speedup(self) -> float:
        """How many times as fast the drafted one was."""
        return self.drafted.speed / self.plain.speed


def measured(temperature: float, texts: Sequence[Twice]) -> Measured:
    """The numbers of one temperature; speeds are medians over texts."""
    telling = [text for text in texts if len(text.plain.tokens) >= _SHORT] or list(texts)
    speedups = [text.speedup for text in telling]
    drafted = [text.drafted.statistics for text in texts]
    steps, tokens = sum(one.steps for one in drafted), sum(one.completion_tokens for one in drafted)
    accepted = by_place(one.accepted_per_depth for one in drafted)
    spent = sum(seconds for one in drafted for phase, seconds in one.seconds.items() if phase != "queue")
    return Measured(
        temperature=temperature,
        runs=len(texts),
        tokens=tokens,
        speedup=round(averages.median(speedups), 3),
        spread=(round(min(speedups), 3), round(max(speedups), 3)),
        drafted_speed=round(averages.median(text.drafted.speed for text in telling), 2),
        plain_speed=round(averages.median(text.plain.speed for text in telling), 2),
        tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3),
        propose_share=round(sum(one.seconds.get("propose", 0.0) for one in drafted) / max(spent, 1e-9), 3),
        accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in drafted)),
        same_tokens=all(text.drafted.tokens == text.plain.tokens for text in texts),
    )
