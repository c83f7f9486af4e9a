"""From texts decoded twice to numbers, and a report for people: one row per finding."""

from __future__ import annotations

import math
import os
import statistics as averages
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TextIO

from foresay.server.engine.checks import CheckReport, Measured
from foresay.spec.accept import GAIN, SCATTERED, SHOWN, ByDepth, summed, tokens_per_step
from foresay.spec.trace import Statistics

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Texts with fewer tokens do not count for speed, unless all are shorter.
_SHORT = 8
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


def measured(temperature: float, texts: Sequence[Twice]) -> Measured:
    """The numbers of one temperature."""
    telling = [text for text in texts if len(text.plain.tokens) >= _SHORT] or list(texts)
    speeds = Speeds.of((text.drafted.statistics, text.plain.statistics) for text in telling)
    drafted = [text.drafted.statistics for text in texts]
    steps, tokens = sum(one.steps for one in drafted), sum(one.completion_tokens for one in drafted)
    accepted = summed(one.accepted_per_depth for one in drafted)
    crowded = averages.mean(text.drafted.crowded for text in texts)
    spent = sum(seconds for one in drafted for phase, seconds in one.seconds.items() if phase != "queue")
    return Measured(
        temperature=temperature,
        runs=len(texts),
        tokens=tokens,
        speedup=rounded(speeds.speedup),
        spread=rounded_pair(speeds.spread),
        interval=rounded_pair(speeds.interval),
        crowded=round(crowded, 3),
        unknown=why_unknown(speeds, drafted, crowded),
        drafted_speed=round(speeds.drafted, 2),
        plain_speed=round(speeds.plain, 2),
        tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3),
        propose_share=round(sum(one.seconds.get("propose", 0.0) for one in drafted) / max(spent, 1e-9), 3),
        accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in drafted)),
        same_tokens=all(text.drafted.tokens == text.plain.tokens for text in texts),
    )


def rounded(speedup: float | None) -> float | None:
    """Rounded for programs."""
    return None if speedup is None else round(speedup, 3)


def rounded_pair(pair: tuple[float, float] | None) -> tuple[float, float] | None:
    """Rounded for programs."""
    return None if pair is None else (round(pair[0], 3), round(pair[1], 3))


def factor(speedup: float | None) -> str:
    """A speed-up for people."""
    return "unknown" if speedup is None else f"{speedup:.2f}x"


# -- what the numbers mean --------------------------------------------------------------------------------


#: Below this many tokens per step the drafter is hardly ever right.
_SELDOM_RIGHT = 1.4
#: Above this share of a step's time the drafter itself is too slow.
_COSTLY = 0.35


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


def advice(measured: Sequence[Measured], levels: int) -> str:
    """Advice in a sentence. levels: draft depth of each step."""
    speeds = [one.speedup for one in measured if one.speedup is not None]
    each = " and ".join(f"{factor(one.speedup)} at temperature {one.temperature:g}" for one in measured if one.speedup)
    if unknown := next(filter(None, (one.unknown for one in measured)), ""):
        return f"Cannot tell how much it gains{f' ({each})' if each else ''}: {unknown}."
    if min(speeds) >= GAIN:
        return f"On this machine this pair writes faster than the target alone: {each}."
    if max(speeds) < GAIN:
        slow = "slower than" if max(speeds) <= 1 / GAIN else "no faster than"
        return f"On this machine this pair is {slow} the target alone ({each}): {_change(measured, levels)}."
    better = max(measured, key=lambda one: one.speedup or 0.0).temperature
    return f"On this machine this pair gains only at temperature {better:g} ({each}): {_change(measured, levels)}."


def gains(before: Sequence[Measured], after: Sequence[Measured]) -> bool:
    """Whether ``after`` is significantly faster at every temperature."""
    pairs = zip(before, after, strict=True)
    if any(one.unknown for one in after):
        return False
    return all((later.speedup or 0.0) >= GAIN * (earlier.speedup or 1.0) for earlier, later in pairs)


def _change(measured: Sequence[Measured], levels: int) -> str:
    """The likeliest cause, and what to do about it."""
    per_step = min(one.tokens_per_step for one in measured)
    share = max(one.propose_share for one in measured)
    fewer = f", or draft less (--draft-tokens {max(1, levels // 2)})" if levels > 1 else ""
    if per_step < _SELDOM_RIGHT:
        return (
            f"a step writes only {per_step:.2f} tokens, so the drafter is seldom right; use one made for this target, "
            "or --draft none"
        )
    if share > _COSTLY:
        return f"drafting takes {share:.0%} of the time; use a smaller drafter{fewer}, or --draft none"
    return f"checking the drafts costs more than they save; use --draft none{fewer}"


_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def show(report: CheckReport, out: TextIO) -> None:
    """Print the report: laid out and in colour on a terminal (``NO_COLOR`` keeps colours away), else as plain lines."""
    if out.isatty():
        _show_rich(report, out)
    else:
        out.write(plain(report))
    out.flush()


def plain(report: CheckReport) -> str:
    """One line per finding, and one for its fix."""
    width = max(len(finding.subject) for finding in report.findings)
    lines = [f"{report.target} with --draft {report.draft}"]
    for finding in report.findings:
        lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  fix: {finding.fix}")
    lines += ["  ".join(row) for row in _measured_rows(report.probe)]
    return "\n".join([*lines, *filter(None, [report.verdict, report.recommended]), ""])


def _show_rich(report: CheckReport, out: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False, no_color=bool(os.environ.get("NO_COLOR")))
    console.print(Text.assemble((report.target, "bold"), " with --draft ", (report.draft, "bold")))
    console.print(_findings(report))
    if report.probe:
        console.print(_measurements(report.probe))
    console.print(Text(report.verdict, style="bold green" if report.works else "bold red"))
    if report.recommended:
        console.print(Text(report.recommended))


def _findings(report: CheckReport) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for finding in report.findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\nfix: {finding.fix}", style="italic")
        grid.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.subject, style="dim"), text)
    return grid


def _measurements(probe: list[Measured]) -> RenderableType:
    """The table, and below it what does not fit a column."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header, *rows = (row[:-1] for row in _measured_rows(probe))
    table = Table(*header, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    shares = [(one.temperature, one.accepted_by_depth.cumulative) for one in probe]
    depths = [f"{' '.join(f'{share:.0%}' for share in each[:SHOWN])} at T {at:g}" for at, each in shares if each]
    return Group(table, *[Text(f"accepted at depth 1, 2, ...: {line}") for line in depths])


def _measured_rows(probe: list[Measured]) -> list[tuple[str, ...]]:
    """A table of the measurements, with a header; empty if there are none."""
    if not probe:
        return []
    rows: list[tuple[str, ...]] = [("T", "speed-up", "tokens/s", "alone", "tokens per step", "accepted by depth")]
    for one in probe:
        spread = "" if one.spread is None else f" ({one.spread[0]:.2f} to {one.spread[1]:.2f})"
        speeds = (f"{one.drafted_speed:.1f}", f"{one.plain_speed:.1f}", f"{one.tokens_per_step:.2f}")
        rows.append(
            (
                f"{one.temperature:g}",
                f"{factor(one.speedup)}{spread}",
                *speeds,
                str(one.accepted_by_depth),
            )
        )
    return rows
