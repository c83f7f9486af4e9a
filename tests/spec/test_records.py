"""The records that a token passes on the host are those that docs/structures.md names, and few."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresay.spec.sampling import SamplingParams
from tests.spec.house import House
from tests.spec.tables import Guesser, TableModel

STRUCTURES = Path(__file__).parents[2] / "docs" / "structures.md"
#: msgspec makes these without a call that Python can see.
STRUCTS = {"Origin", "Delta", "StepTrace"}
#: What the clock and the model made of a table have of their own.
NO_RECORDS = {"Stopwatch"}


def named() -> set[str]:
    """The first column of the table in docs/structures.md."""
    table = STRUCTURES.read_text("utf-8").split("| record | made by | says |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def made_in(step: Callable[[], object]) -> set[str]:
    """Classes of the engine that a step makes something of."""
    found = set()

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_name in ("__init__", "__new__"):
            first = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            kind = first if isinstance(first, type) else type(first)
            if kind.__module__.startswith("foresay."):
                found.add(kind.__name__)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found - NO_RECORDS


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 2, 1)], ids=["plain", "chain", "tree"])
def test_a_token_passes_nine_records(shape: tuple[int, ...]) -> None:
    model = TableModel(1)
    house = House(model, Guesser(model, 0.8, full=True) if shape else None, shape)
    house.add("one", [1, 2, 3], SamplingParams(seed=1, max_tokens=20))
    house.step()
    found = made_in(house.engine.step) | STRUCTS
    assert found == named()
    assert len(found) == 9
