"""What a probe has measured, in numbers and in words, and a report for people: one row per finding."""

from __future__ import annotations

import os
import statistics as averages
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from foresay.server.cli.measure import Speeds, Twice, factor, rounded, rounded_pair, why_unknown
from foresay.server.engine.checks import CheckReport, Measured
from foresay.spec.accept import GAIN, SHOWN, ByDepth, summed, tokens_per_step

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Texts with fewer tokens do not count for speed, unless all are shorter.
_SHORT = 8


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


# -- what the numbers mean --------------------------------------------------------------------------------


#: Below this many tokens per step the drafter is hardly ever right.
_SELDOM_RIGHT = 1.4
#: Above this share of a step's time the drafter itself is too slow.
_COSTLY = 0.35


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
