"""The records that a token passes on the host, with the bundled pair and ``auto``, are those that docs/structures.md
names, and few."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.members import OPEN
from foresay.spec.budget.plan import Plan, Share
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import DraftTree, TreeShape

STRUCTURES = Path(__file__).parents[2] / "docs" / "structures.md"
#: msgspec makes these without a call that Python can see.
STRUCTS = {"Origin", "Delta", "StepTrace"}
PRICED = replace(OPEN.limited(4), price=Price(0.0, [0.02 * rows for rows in range(32)], 4))


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


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    """One that drafts as by default, with all that it records."""
    made = build_engine(EngineConfig(draft="auto", device="cpu", max_model_len=1024, kv_tokens=4096))
    while made.prepare_one():
        pass
    return made


def planned(kind: str, root: int) -> Plan:
    """Drafts that the budget may plan: none, a chain, or a tree of two drafters."""
    if kind == "plain":
        return Plan()
    if kind == "chain":
        return Plan.of([Share("draft_model", TreeShape.chain(2))])
    found = DraftTree.chain([root, 7, 8], "suffix", (1.0, 0.5, 0.3))
    return Plan.of([Share("suffix", found.shape, found), Share("draft_model", PRICED)])


@pytest.mark.parametrize(("kind", "most"), [("plain", 10), ("chain", 12), ("tree", 17)])
def test_a_token_passes_few_records(kind, most, engine, made, monkeypatch) -> None:
    """Ten of a plain one; the names of the largest case are there to be read."""
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    engine.add(Request(id=kind, prompt=list(range(5, 40)), params=params))
    engine.step()
    monkeypatch.setattr(engine.scheduler.budget, "plan", lambda texts: [planned(kind, one.tokens[-1]) for one in texts])
    engine.step()
    made.clear()
    engine.step()
    found = (made | STRUCTS) - {"Stopwatch"}
    assert len(found) <= most, sorted(found)
    assert kind != "plain" or found == named()
    engine.cancel(kind)
