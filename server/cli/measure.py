"""Texts decoded with drafts and without, in turns, and what they show: for ``foresay bench`` and ``check --probe``.

In turns, so that a machine that slows down slows both ways. Speeds are medians, and the speed-up is the quotient of the
two that are shown. What may be due to other programs or chance is not reported as a gain.
"""

from __future__ import annotations

import math
import statistics as averages
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from foresay.spec.accept import GAIN, SCATTERED, tokens_per_step
from foresay.spec.trace import Statistics

Way = TypeVar("Way")

#: The error probability of a speed-up's interval.
_DOUBT = 0.05


@dataclass(frozen=True, slots=True)
class Written:
    """One finished text. crowded: as in :class:`~foresay.spec.trace.StepTrace`, when it ended."""

    tokens: list[int]
    statistics: Statistics
    crowded: float = 0.0


@dataclass(frozen=True, slots=True)
class Twice:
    """One text, decoded with the drafter and without."""

    drafted: Written
    plain: Written


def in_turns(ways: Sequence[Way], turn: int, write: Callable[[Way], Written]) -> list[Written]:
    """One text, decoded in each way: by turns in this order and in the reverse one. Returns them in the order of
    ``ways``."""
    if turn % 2:
        return [write(way) for way in reversed(ways)][::-1]
    return [write(way) for way in ways]


class Speeds(NamedTuple):
    """Speeds of the same texts both ways, in tokens per second after the first ones: medians, and each way's range.
    speedup: quotient of the medians. spread: the least and greatest speed-up of single texts, between which it lies.
    interval: the 95 % confidence interval of the median of single speed-ups, if there are six or more texts. None: no
    text has a speed.
    """

    drafted: float
    plain: float
    speedup: float | None
    spread: tuple[float, float] | None
    drafted_range: tuple[float, float]
    plain_range: tuple[float, float]
    interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, pairs: Iterable[tuple[Statistics, Statistics]]) -> Speeds:
        """Make it from pairs of texts, drafted and plain. A text that ended with its prefill or its first token has no
        speed and is left out; if none is left, all speeds are 0."""
        longer = [pair for pair in pairs if min(one.completion_tokens for one in pair) > 1]
        rates = [(one.decode_tokens_per_second, other.decode_tokens_per_second) for one, other in longer]
        rates = [pair for pair in rates if all(pair)]
        if not rates:
            return cls(0.0, 0.0, None, None, (0.0, 0.0), (0.0, 0.0))
        each, (drafted, plain) = [one / other for one, other in rates], zip(*rates, strict=True)
        middle, other = averages.median(drafted), averages.median(plain)
        spread, fast, slow = ((min(one), max(one)) for one in (each, drafted, plain))
        return cls(middle, other, middle / other, spread, fast, slow, _interval(each))


def _interval(each: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the median, by the sign test, which assumes no distribution."""
    ordered, cut, beyond = sorted(each), 0, 0.0
    while (beyond := beyond + math.comb(len(ordered), cut) / 2 ** len(ordered)) <= _DOUBT / 2:
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[-1 - cut]


def rounded(speedup: float | None) -> float | None:
    """Rounded for programs."""
    return None if speedup is None else round(speedup, 3)


def rounded_pair(pair: tuple[float, float] | None) -> tuple[float, float] | None:
    """Rounded for programs."""
    return None if pair is None else (round(pair[0], 3), round(pair[1], 3))


def factor(speedup: float | None) -> str:
    """A speed-up for people."""
    return "unknown" if speedup is None else f"{speedup:.2f}x"


#: Share of runnable time that threads wait for a core above which a machine counts as busy.
_CROWDED = 0.1
#: A step with drafts is never faster than one without, so a speed-up above tokens per step times this is noise.
_BEYOND = 1.1
#: A speed-up near 1 whose interval is within this factor certainly means no gain.
_NEAR = 1.1


def why_unknown(speeds: Speeds, drafted: Sequence[Statistics], crowded: float) -> str:
    """Why these speeds do not show whether drafts gain, and what to do; empty if they do. drafted: statistics of the
    drafted texts. crowded: the share of the time that threads waited for a core."""
    if speeds.speedup is None or speeds.spread is None or speeds.interval is None:
        return _nothing(drafted)
    if not any(one.drafted for one in drafted):
        return "nothing was drafted, so a difference is noise"
    (least, most), (low, high), most_tokens = speeds.spread, speeds.interval, _most_tokens(drafted)
    if crowded > _CROWDED:
        return f"other programs kept the cores busy for {crowded:.0%} of the time; {_AGAIN}"
    if most > SCATTERED * least:
        return (
            f"single texts lie between {least:.2f}x and {most:.2f}x: something else keeps this machine busy; {_AGAIN}"
        )
    if speeds.speedup > _BEYOND * most_tokens:
        return f"{most_tokens:.2f} tokens per step cannot make it {speeds.speedup:.2f} times as fast; {_AGAIN}"
    none = 1 / GAIN < speeds.speedup < GAIN and low >= 1 / _NEAR and high <= _NEAR
    if min(low, speeds.speedup) <= 1.0 <= max(high, speeds.speedup) and not none:
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
