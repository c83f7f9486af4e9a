"""What a run has found, in short: measured beside predicted, for its card, and all that did not hold.

``python -m bench.gpu.report LINES`` shows the runs of a file again, each by itself: two cards are never in one table.
``python -m bench.gpu.report`` writes ``predictions.json`` anew (:mod:`bench.gpu.model`; at home, it needs no GPU): the
rows of the table, each with the measurement that it is about and what that should be on each card, by arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.arithmetic import CARDS, Step
from bench.binder import bound
from bench.gpu import model
from bench.gpu.worker import CHECK, ENDED, FAILED, LEFT_OUT, Lines, said

TABLE = Path(__file__).with_name("predictions.json")


def found(lines: Sequence[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """The newest number that a row of the table is about."""
    fits = (line for line in reversed(lines) if row["of"].items() <= line.items())
    numbers = (line.get(row["number"]) for line in fits)
    return next((float(number) for number in numbers if isinstance(number, float | int)), None)


def shown(lines: Sequence[dict[str, Any]]) -> str:
    """The table of one run."""
    name = lines[-1]["card"]
    card = next((card for card in ("H100", "H200") if card in name), "")
    rows = [f"{name}, run {lines[-1]['run']}", f"{'':44}{'measured':>10}{'predicted':>10}{'at most':>10}"]
    for row in json.loads(TABLE.read_text()):
        measured, most = found(lines, row), row.get("most", {}).get(card)
        numbers = measured, row.get("predicted", {}).get(card), most
        cells = "".join(f"{'' if number is None else f'{number:.4g}':>10}" for number in numbers)
        more = "  MORE" if most and measured and measured > most else ""
        rows += [f"{row['says']:44}{cells}{more}".rstrip()] if measured is not None else []
    return "\n".join(rows)


def finish(lines: Lines) -> int:
    """Say what a run has found and what not; the exit code."""
    those = lines.read()
    print(shown(those))
    bad = [line for line in those if line["unit"] == FAILED or (line["unit"] == CHECK and line["value"] is not True)]
    bad += [line for line in those if line["unit"] == ENDED and line["value"] not in ("held", "failed")]
    left_out = [line for line in those if line["unit"] == LEFT_OUT]
    for title, which in (("DID NOT HOLD", bad), ("LEFT OUT", left_out)):
        for line in which:
            print(f"{title} {said(line)[:250]}")
    nothing = "; its figures mean nothing" * ("CPU" in lines.card)
    print(f"{len(those)} lines in {lines.path.name}, {lines.now:.0f} s{nothing}")
    print(f"NOT done: {len(bad)} did not hold, {len(left_out)} left out" if bad or left_out else "done")
    return 1 if bad else 4 if left_out else 0


def predicted(counted: dict[str, list[Step]]) -> list[dict[str, Any]]:
    """The table, with what is expected of each row that says something the arithmetic knows."""
    made, table = product(CARDS, counted.items()), json.loads(TABLE.read_text())
    with bound():
        known = {(card.name, says): one for card, step in made for says, one in model.predicted(*step, card).items()}
    for row in table:
        if found := {name: round(one, 3) for (name, says), one in known.items() if says == row["says"]}:
            row["predicted"] = found
    return list(table)


def main(given: Sequence[str]) -> None:
    """Show the runs of these files; write the predictions anew if there are none."""
    if not given:
        rows = ",\n".join(f" {json.dumps(row)}" for row in predicted(model.counted()))
        TABLE.write_text(f"[\n{rows}\n]\n")
    for path in given:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        for run in dict.fromkeys(line["run"] for line in lines):
            print(shown([line for line in lines if line["run"] == run]), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
