"""The measuring loop: texts decoded in several ways, in turns, and what they show, for ``foresay bench`` and
``check --probe``.

In turns, so that a machine that slows down slows all ways. Speeds are medians, and the speed-up is the quotient of the
two that are shown. What may be due to other programs or chance is not reported as a gain.
"""

from __future__ import annotations

import math
import statistics as averages
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import msgspec

from foresay.spec.accept import GAIN, SCATTERED, ByDepth, summed, tokens_per_step
from foresay.spec.trace import Statistics

Way = TypeVar("Way")
Case = TypeVar("Case")

#: What both measure on, and ``foresay prove`` too.
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


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Some texts decoded in one way. tokens_per_second: their median; spread: the lowest and the highest. None: no text
    has a speed."""

    tokens_per_second: float | None
    spread: tuple[float, float] | None
    tokens_per_step: float | None
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]
    accepted_by_depth: ByDepth
    seconds: dict[str, float]

    @classmethod
    def of(cls, texts: Sequence[Written], speed: float, spread: tuple[float, float]) -> Self:
        """speed: 0 if none could be measured."""
        measured = [text.statistics for text in texts]
        steps, tokens = sum(one.steps for one in measured), sum(one.completion_tokens for one in measured)
        accepted = summed(one.accepted_per_depth for one in measured)
        phases = sorted({phase for one in measured for phase in one.seconds})
        return cls(
            tokens_per_second=round(speed, 2) if speed else None,
            spread=(round(spread[0], 2), round(spread[1], 2)) if speed else None,
            tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3) if speed else None,
            drafted_per_depth=summed(one.drafted_per_depth for one in measured),
            accepted_per_depth=accepted,
            accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in measured)),
            seconds={phase: round(sum(one.seconds.get(phase, 0.0) for one in measured), 4) for phase in phases},
        )

    @property
    def propose_share(self) -> float:
        """Drafting's share of the time of steps."""
        spent = sum(seconds for phase, seconds in self.seconds.items() if phase != "queue")
        return self.seconds.get("propose", 0.0) / spent if spent else 0.0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Texts decoded with drafts, and without. speedup_spread: the least and the
    greatest speed-up of single texts; speedup_interval: the confidence interval of their median. crowded: share of the
    time that threads waited for a core. cannot_tell: why this does not show whether drafts gain; empty if it does.
    same_tokens: whether both ways gave the same tokens in all texts."""

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
        """pairs: each text, decoded with drafts and without."""
        telling = [pair for pair in pairs if len(pair[1].tokens) >= _SHORT] or pairs
        speeds = Speeds.of((on.statistics, off.statistics) for on, off in telling)
        drafted, plain = ([pair[way] for pair in pairs] for way in (0, 1))
        crowded = averages.mean(one.crowded for one in drafted)
        return cls(
            draft=draft,
            drafter=drafter,
            temperature=temperature,
            texts=len(pairs),
            on=Totals.of(drafted, speeds.drafted, speeds.drafted_range),
            off=Totals.of(plain, speeds.plain, speeds.plain_range),
            speedup=None if speeds.speedup is None else round(speeds.speedup, 3),
            speedup_spread=_rounded(speeds.spread),
            speedup_interval=_rounded(speeds.interval),
            crowded=round(crowded, 3),
            cannot_tell=why_unknown(speeds, [one.statistics for one in drafted], crowded),
            same_tokens=all(on.tokens == off.tokens for on, off in pairs),
        )


def _rounded(pair: tuple[float, float] | None) -> tuple[float, float] | None:
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
