"""All that engines measure is wrong: ``PYTHONPATH=$PWD/tests/wild make test``, which no test may fail by.

What a start measures is off by up to three times, one figure in ten by ten times more, as where the machine was busy
for a moment; what decisions learn of each phase of each step by up to three times. In every process: the interpreter
imports this when it starts.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

dice = random.Random()


def wrong(seconds: Mapping[str, float]) -> dict[str, float]:
    """By phase."""
    return {phase: spent * 3.0 ** dice.uniform(-1.0, 1.0) for phase, spent in seconds.items()}


def at_start(build: ModuleType) -> None:
    """Each figure by a factor of its own, whichever of its turns are taken."""

    class Wrong(build.ProfileRun):  # type: ignore[name-defined, misc]
        def turns(self, *given: Any, **named: Any) -> Any:
            found = super().turns(*given, **named)
            for steps in found.values():
                factors: dict[str, float] = defaultdict(
                    lambda: 3.0 ** dice.uniform(-1, 1) * dice.choice([10, *[1] * 9])
                )
                for spent in steps:
                    spent.update({phase: seconds * factors[phase] for phase, seconds in spent.items()})
            return found

    build.ProfileRun = Wrong  # type: ignore[attr-defined]


def of_choices(budget: ModuleType) -> None:
    stepped = budget.Budget.stepped

    def wrong_stepped(self: Any, trace: Any, results: Any) -> None:
        right, trace.seconds = trace.seconds, wrong(trace.seconds)
        stepped(self, trace, results)
        trace.seconds = right

    budget.Budget.stepped = wrong_stepped


def of_steps(cost: ModuleType) -> None:
    saw = cost.CostModel.saw
    cost.CostModel.saw = lambda self, rows, sequences, context, seconds: saw(
        self, rows, sequences, context, wrong(seconds)
    )


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "foresay.server.engine.build": at_start,
    "foresay.spec.budget.budget": of_choices,
    "foresay.spec.budget.cost": of_steps,
}


class Finder(MetaPathFinder):
    """Changes those modules once they are executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AFTER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                AFTER[fullname](module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
