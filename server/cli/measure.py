"""The measuring loop of ``foresay bench``: texts decoded in several ways, in turns, and what they show.

In turns, so that a machine that slows down slows all ways. Speeds are medians, and the speed-up is the quotient of the
two that are shown. What may be due to other programs or chance is not reported as a gain.
"""

from __future__ import annotations

import math
import statistics as averages
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import msgspec

from foresay.spec.accept import GAIN, SCATTERED, ByDepth, summed, tokens_per_step
from foresay.spec.trace import Statistics

Way = TypeVar("Way")
Case = TypeVar("Case")

#: What it measures on, and ``foresay prove`` too.
PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "Tom had 12 apples. He gave 5 of them to his sister. How many apples",
    "In the middle of the forest stood a house, and in that house",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you because",
)
#: The error probability of a speed-up's interval.
_DOUBT = 0.05
#: Texts with fewer tokens do not count for speed, unless all are shorter.
_SHORT = 8


@dataclass(frozen=True, slots=True)
class Written:
    """One finished text. crowded: as in :class:`~foresay.spec.trace.StepTrace`, when it ended."""

    tokens: list[int]
    statistics: Statistics
    crowded: float = 0.0


def in_turns(
    ways: Sequence[Way], cases: Iterable[tuple[int, Case]], write: Callable[[Case, Way], Written]
) -> Iterator[tuple[Case, list[Written]]]:
    """Each case, which has a turn, with its texts in the order of ``ways``: decoded in this order, and in every other
    turn in the reverse one."""
    for turn, case in cases:
        step = -1 if turn % 2 else 1
        yield case, [write(case, way) for way in ways[::step]][::step]


def _interval(each: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the median, by the sign test, which assumes no distribution."""
    ordered, cut, beyond = sorted(each), 0, 0.0
    while (beyond := beyond + math.comb(len(ordered), cut) / 2 ** len(ordered)) <= _DOUBT / 2:
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[-1 - cut]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Some texts decoded in one way. tokens_per_second: the median, after the first tokens; spread: the lowest and the
    highest. None: no text has a speed."""

    tokens_per_second: float | None
    spread: tuple[float, float] | None
    tokens_per_step: float | None
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]
    accepted_by_depth: ByDepth
    seconds: dict[str, float]

    @classmethod
    def of(cls, measured: Sequence[Statistics], speeds: Sequence[float]) -> Self:
        """speeds: of those that have one."""
        steps, tokens = sum(one.steps for one in measured), sum(one.completion_tokens for one in measured)
        accepted = summed(one.accepted_per_depth for one in measured)
        phases = sorted({phase for one in measured for phase in one.seconds})
        return cls(
            tokens_per_second=round(averages.median(speeds), 2) if speeds else None,
            spread=(round(min(speeds), 2), round(max(speeds), 2)) if speeds else None,
            tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3) if speeds else None,
            drafted_per_depth=summed(one.drafted_per_depth for one in measured),
            accepted_per_depth=accepted,
            accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in measured)),
            seconds={phase: round(sum(one.seconds.get(phase, 0.0) for one in measured), 4) for phase in phases},
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Texts decoded with drafts, and without. speedup: quotient of the medians; None: no text has a speed.
    speedup_spread: the least and the greatest of single texts, between which it lies; speedup_interval: the 95 %
    confidence interval of their median. crowded: share of the time that threads waited for a core. cannot_tell: why
    this does not show whether drafts gain; empty if it does. same_tokens: whether both ways gave the same tokens in all
    texts."""

    draft: str
    drafter: str
    temperature: float
    texts: int
    on: Totals
    off: Totals
    speedup: float | None
    speedup_spread: tuple[float, float] | None
    speedup_interval: tuple[float, float] | None
    crowded: float
    cannot_tell: str
    same_tokens: bool

    @classmethod
    def of(cls, pairs: Sequence[Sequence[Written]], temperature: float, draft: str = "", drafter: str = "") -> Self:
        """pairs: each text, decoded with drafts and without. One that ended with its prompt or its first token has no
        speed."""
        drafted, plain = ([pair[way].statistics for pair in pairs] for way in (0, 1))
        longer = [pair for pair in pairs if len(pair[1].tokens) >= _SHORT] or pairs
        rates = [[_rate(one.statistics) for one in pair] for pair in longer]
        timed = [pair for pair in rates if all(pair)]
        fast, slow = ([pair[way] for pair in timed] for way in (0, 1))
        each = [one / other for one, other in timed]
        speedup = averages.median(fast) / averages.median(slow) if timed else None
        interval = _interval(each) if timed else None
        crowded = averages.mean(pair[0].crowded for pair in pairs)
        return cls(
            draft=draft,
            drafter=drafter,
            temperature=temperature,
            texts=len(pairs),
            on=Totals.of(drafted, fast),
            off=Totals.of(plain, slow),
            speedup=None if speedup is None else round(speedup, 3),
            speedup_spread=(round(min(each), 3), round(max(each), 3)) if timed else None,
            speedup_interval=None if interval is None else (round(interval[0], 3), round(interval[1], 3)),
            crowded=round(crowded, 3),
            cannot_tell=why_unknown(speedup, each, drafted, crowded),
            same_tokens=all(on.tokens == off.tokens for on, off in pairs),
        )


def _rate(one: Statistics) -> float:
    """Tokens per second of a text; 0 if it has no speed."""
    return one.decode_tokens_per_second if one.completion_tokens > 1 else 0.0


#: Share of runnable time that threads wait for a core above which a machine counts as busy.
_CROWDED = 0.1
#: A step with drafts is never faster than one without, so a speed-up above tokens per step times this is noise.
_BEYOND = 1.1
#: A speed-up near 1 whose interval is within this factor certainly means no gain.
_NEAR = 1.1


def why_unknown(speedup: float | None, each: Sequence[float], drafted: Sequence[Statistics], crowded: float) -> str:
    """Why these speeds do not show whether drafts gain, and what to do; empty if they do. each: the speed-ups of single
    texts. drafted: statistics of the drafted texts. crowded: the share of the time that threads waited for a core."""
    if speedup is None:
        return _nothing(drafted)
    if not any(one.drafted for one in drafted):
        return "nothing was drafted, so a difference is noise"
    least, most, (low, high), most_tokens = min(each), max(each), _interval(each), _most_tokens(drafted)
    if crowded > _CROWDED:
        return f"other programs kept the cores busy for {crowded:.0%} of the time; {_AGAIN}"
    if most > SCATTERED * least:
        return (
            f"single texts lie between {least:.2f}x and {most:.2f}x: something else keeps this machine busy; {_AGAIN}"
        )
    if speedup > _BEYOND * most_tokens:
        return f"{most_tokens:.2f} tokens per step cannot make it {speedup:.2f} times as fast; {_AGAIN}"
    none = 1 / GAIN < speedup < GAIN and low >= 1 / _NEAR and high <= _NEAR
    if min(low, speedup) <= 1.0 <= max(high, speedup) and not none:
        return f"it may be anything between {low:.2f}x and {high:.2f}x; measure more texts, on a quiet machine"
    return ""


_AGAIN = "run this again when it is quiet"


def _nothing(drafted: Sequence[Statistics]) -> str:
    """Why no text has a speed."""
    if max((one.completion_tokens for one in drafted), default=0) <= 1:
        return "the model ended after 1 token: nothing to measure"
    return "every text was over when its prompt was read; ask for longer ones"


def _most_tokens(drafted: Sequence[Statistics]) -> float:
    """An upper bound of tokens per step: with the prefill pass, or without it and its token."""
    steps, tokens = sum(one.steps for one in drafted), sum(one.completion_tokens for one in drafted)
    later = tokens_per_step(tokens - len(drafted), max(0, steps - len(drafted)))
    return max(tokens_per_step(tokens, steps) or 0.0, later or 0.0)
