"""A run's results, in short: measured next to the run before on such a card, and what failed.

``python -m bench.gpu.report LINES`` shows the runs of a file again, each by itself: two cards are never in one table.
With ``--keep`` the numbers of the last one are from then on those of the run before (``bars.json``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.worker import CHECK, ENDED, FAILED, LEFT_OUT, ORDERLY, Lines, line_text

#: The rows of the table: the measurement of each; by card the result of the run before, and the goal.
TABLE = Path(__file__).with_name("bars.json")


def found(lines: Sequence[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """The newest number for a row of the table."""
    fits = (line for line in reversed(lines) if row["of"].items() <= line.items())
    numbers = (line.get(row["number"]) for line in fits)
    return next((float(number) for number in numbers if isinstance(number, float | int)), None)


def card_of(lines: Sequence[dict[str, Any]]) -> str:
    """The card that a run was made on, "" for an unknown one."""
    return next((card for card in ("H100", "H200") if card in lines[-1]["card"]), "")


def shown(lines: Sequence[dict[str, Any]]) -> str:
    """The table of one run."""
    name, card = lines[-1]["card"], card_of(lines)
    rows = [f"{name}, run {lines[-1]['run']}", f"{'':44}{'measured':>10}{'before':>10}{'at most':>10}"]
    for row in json.loads(TABLE.read_text()):
        measured, most = found(lines, row), row.get("most", {}).get(card)
        numbers = measured, row.get("before", {}).get(card), most
        cells = "".join(f"{'' if number is None else f'{number:.4g}':>10}" for number in numbers)
        more = "  MORE" if most and measured and measured > most else ""
        rows += [f"{row['says']:44}{cells}{more}".rstrip()] if measured is not None else []
    return "\n".join(rows)


def finish(lines: Lines) -> int:
    """Print a run's results and what is missing; the exit code."""
    those = lines.read()
    print(shown(those))
    bad = [line for line in those if line["unit"] == FAILED or (line["unit"] == CHECK and line["value"] is not True)]
    bad += [line for line in those if line["unit"] == ENDED and line["value"] not in ORDERLY]
    left_out = [line for line in those if line["unit"] == LEFT_OUT]
    for title, which in (("DID NOT HOLD", bad), ("LEFT OUT", left_out)):
        for line in which:
            print(f"{title} {line_text(line)[:250]}")
    nothing = "; its figures mean nothing" * ("CPU" in lines.card)
    print(f"{len(those)} lines in {lines.path.name}, {lines.now:.0f} s{nothing}")
    print(f"NOT done: {len(bad)} did not hold, {len(left_out)} left out" if bad or left_out else "done")
    return 1 if bad else 4 if left_out else 0


def keep(lines: Sequence[dict[str, Any]]) -> None:
    """Store this run's results in the table as those of the run before."""
    table, card = json.loads(TABLE.read_text()), card_of(lines)
    for row in table:
        if card and (number := found(lines, row)) is not None:
            row.setdefault("before", {})[card] = round(number, 4)
    rows = ",\n".join(f" {json.dumps(row)}" for row in table)
    TABLE.write_text(f"[\n{rows}\n]\n")


def main(given: Sequence[str]) -> None:
    """Show the runs of these files."""
    for path in (each for each in given if each != "--keep"):
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        for run in dict.fromkeys(line["run"] for line in lines):
            those = [line for line in lines if line["run"] == run]
            print(shown(those), end="\n\n")
            if "--keep" in given:
                keep(those)


if __name__ == "__main__":
    main(sys.argv[1:])
