"""A report for people: one row per finding, marked in words, so that it reads without colour too."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from server.engine.checks.report import Measured, Report

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def show(report: Report, out: TextIO) -> None:
    """Print the report: laid out and in colour on a terminal (``NO_COLOR`` keeps colours away), else as plain lines."""
    if out.isatty():
        _show_rich(report, out)
    else:
        out.write(plain(report))
    out.flush()


def plain(report: Report) -> str:
    """One line per finding, and one for what would mend it."""
    width = max(len(finding.subject) for finding in report.findings)
    lines = [f"{report.target} with --draft {report.draft}"]
    for finding in report.findings:
        lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  fix: {finding.fix}")
    lines += ["  ".join(row) for row in _measured_rows(report.probe)]
    return "\n".join([*lines, *filter(None, [report.verdict, report.recommended]), ""])


def _show_rich(report: Report, out: TextIO) -> None:
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


def _findings(report: Report) -> RenderableType:
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
    from rich.table import Table

    header, *rows = _measured_rows(probe)
    table = Table(*header, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _measured_rows(probe: list[Measured]) -> list[tuple[str, ...]]:
    """A table of what was measured, its header first; empty if nothing was."""
    if not probe:
        return []
    rows: list[tuple[str, ...]] = [("T", "speed-up", "tokens/s", "alone", "tokens per step", "accepted by depth")]
    for one in probe:
        low, high = one.spread
        speeds = (f"{one.drafted_speed:.1f}", f"{one.plain_speed:.1f}", f"{one.tokens_per_step:.2f}")
        rows.append(
            (
                f"{one.temperature:g}",
                f"{one.speedup:.2f}x ({low:.2f} to {high:.2f})",
                *speeds,
                str(one.accepted_by_depth),
            )
        )
    return rows
