"""The records that a token passes on the host are those that docs/structures.md names, and few."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Harness
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


def classes() -> Iterator[type]:
    """Ours, of all modules that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("foresay."):
            yield from (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of those of which something is made from now on."""
    found = set[str]()
    for kind in classes():
        for method in ("__init__", "__new__"):
            old = kind.__dict__.get(method)
            old = old.__func__ if isinstance(old, staticmethod) else old
            if inspect.isfunction(old) and not issubclass(kind, msgspec.Struct):
                monkeypatch.setattr(kind, method, noting(old, kind.__name__, found))
    return found


def noting(old: Callable[..., Any], name: str, found: set[str]) -> Callable[..., Any]:
    def new(*arguments: Any, **named: Any) -> Any:
        found.add(name)
        return old(*arguments, **named)

    return new


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 2, 1)], ids=["plain", "chain", "tree"])
def test_a_token_passes_nine_records(shape: tuple[int, ...], made: set[str]) -> None:
    model = TableModel(1)
    harness = Harness(model, Guesser(model, 0.8, full=True) if shape else None, shape)
    harness.add("one", [1, 2, 3], SamplingParams(seed=1, max_tokens=20))
    harness.step()
    made.clear()
    harness.engine.step()
    found = (made | STRUCTS) - NO_RECORDS
    assert found == named()
    assert len(found) == 9
