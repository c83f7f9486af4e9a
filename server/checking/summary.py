"""From texts that were written twice to numbers: speed-up, acceptance by depth, whether both are the same."""

from __future__ import annotations

import statistics as averages
from collections.abc import Sequence
from dataclasses import dataclass

from server.checking.report import Depth, Measured
from spec.trace import Statistics

#: Texts shorter than this say nothing about speed, unless all are.
_SHORT = 8
#: How many steps must have reached a depth for its acceptance to be told.
_FEW_STEPS = 2


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
    spent = sum(seconds for one in drafted for phase, seconds in one.seconds.items() if phase != "queue")
    return Measured(
        temperature=temperature,
        runs=len(texts),
        tokens=tokens,
        speedup=round(averages.median(speedups), 3),
        spread=(round(min(speedups), 3), round(max(speedups), 3)),
        drafted_speed=round(averages.median(text.drafted.speed for text in telling), 2),
        plain_speed=round(averages.median(text.plain.speed for text in telling), 2),
        tokens_per_step=round(tokens / max(steps, 1), 3),
        propose_share=round(sum(one.seconds.get("propose", 0.0) for one in drafted) / max(spent, 1e-9), 3),
        depths=_depths(drafted),
        same_tokens=all(text.drafted.tokens == text.plain.tokens for text in texts),
    )


def _depths(texts: Sequence[Statistics]) -> list[Depth]:
    """Of the steps that accepted everything before a depth, the share that accepted there too."""
    accepted = [number for one in texts for number in _with_room(one)]
    reached = [sum(number >= depth for number in accepted) for depth in range(max(accepted, default=0) + 2)]
    deepest = max((one.num_spec_tokens for one in texts), default=0)
    return [
        Depth(depth=depth, accepted=round(reached[depth] / reached[depth - 1], 3))
        for depth in range(1, min(deepest + 1, len(reached)))
        if reached[depth - 1] >= _FEW_STEPS
    ]


def _with_room(text: Statistics) -> list[int]:
    """What each step accepted that drafted anything and was not cut short by the text's end."""
    left, found = text.completion_tokens, []
    for drafted, accepted in zip(text.per_step_drafted, text.per_step_accepted, strict=True):
        if drafted and left > text.num_spec_tokens:
            found.append(accepted)
        left -= accepted + 1
    return found
