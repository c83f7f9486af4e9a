"""The newest records as markdown: ``python -m bench report [--results DIR]``.

One section per experiment, from its newest record, with the machine and the command that made it. Records from before
2026-11-27 have other forms, and are left out; ``bench readme`` writes the README's tables from those of peers.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import RESULTS

Entry = dict[str, Any]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS)


def main(args: Namespace) -> None:
    print(report(args.results))


def report(directory: Path) -> str:
    """All sections."""
    entries = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*.json")))
    newest = {entry["bench"]: entry for entry in entries if "groups" in entry}
    return "\n\n".join(section(entry) for _, entry in sorted(newest.items()))


def section(entry: Entry) -> str:
    """The tables of one record, and where its figures come from: models, machine, date, command."""
    machine = entry["machine"]
    models = " + ".join(name for name in (entry.get("target"), entry.get("draft")) if name)
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}"
    tables = [f"{group}\n\n{table(variants)}" for group, variants in entry["groups"].items()]
    origin = "; ".join(filter(None, [models, entry.get("dtype"), where, entry["date"][:10], f"`{entry['command']}`"]))
    return "\n\n".join([f"### {entry['bench']}", *tables, origin])


def table(variants: dict[str, Entry]) -> str:
    """A row for each variant."""
    columns = list(dict.fromkeys(name for row in variants.values() for name in row))
    rows = [[name, *(cell(row.get(column)) for column in columns)] for name, row in variants.items()]
    return markdown(["", *columns], rows)


def cell(value: Any) -> str:
    """A spread, a ratio, a list or a number."""
    match value:
        case None:
            return ""
        case {"median": median, "q1": low, "q3": high}:
            return f"{median:.4g} ({low:.4g} to {high:.4g})"
        case {"ratio": _}:
            return ratio(value)
        case dict():
            return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
        case list():
            return " ".join(f"{one:.2f}" if isinstance(one, float) else str(one) for one in value)
        case float():
            return f"{value:.4g}"
    return str(value)


def ratio(value: Entry | None) -> str:
    """A ratio and its interval, or nothing."""
    return f"{value['ratio']:.2f} ({value['low']:.2f} to {value['high']:.2f})" if value else ""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
