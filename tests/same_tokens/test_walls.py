"""Drafters of ours and the budget that fail, at once or later, once or always, change nothing of a text and end no
engine; afterwards the others draft on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foresay.drafters.combined import members_of
from foresay.spec.budget.budget import Budget
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.test_customs import built
from tests.same_tokens.test_directories import directories, directory, expected
from tests.same_tokens.witness import run

__all__ = ["built", "directories", "directory", "expected"]

#: Two texts at a time and more, one after the other, so that steps are of every kind.
JOBS = [replace(job, arrives=3 * index) for index, job in enumerate(jobs_of(300, (9, 70, 33, 1, 20, 40), 20))]


def failing(owner: object, call: str, first: int, times: int) -> Callable[[], int]:
    """Make a call of an object raise, from call number ``first`` on so many times; returns how often it did."""
    real, calls = getattr(owner, call), 0

    def raising(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if first <= calls < first + times:
            raise RuntimeError("as the test wants it")
        return real(*args, **kwargs)

    raising.__name__ = call
    object.__setattr__(owner, call, raising)
    return lambda: max(0, min(calls - first + 1, times))


def spoken(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "foresay.drafters")


#: Drafter, call, and the draft's shape: chains of one text are one recording on a CPU, in which nothing is called.
CASES = [
    ("draft_model", "propose", {"draft_tree": "3,2,1"}),
    ("draft_model", "propose", {}),
    ("draft_model", "prepare", {"draft_tokens": 4}),
    ("draft_model", "committed", {"draft_tokens": 4}),
    ("draft_model", "finished", {"draft_tree": "3,2,1"}),
    ("suffix", "find", {}),
    ("suffix", "propose", {"draft_tokens": 4}),
    ("suffix", "committed", {}),
]


@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "always"])
@pytest.mark.parametrize(("name", "call", "changes"), CASES, ids=str)
def test_a_drafter_of_ours(built, expected, name, call, changes, times) -> None:
    engine = built(name, **changes)
    failed = failing(members_of(engine.drafter)[name], call, 1, times)
    assert_same(expected, run(engine, JOBS))
    assert_same(expected, run(engine, JOBS))
    engine.check()
    assert failed()
    assert engine.drafter.wall.failures[name] == failed()
    told = call not in ("propose", "find", "prepare")
    assert (name in engine.drafter.wall.off) == (told or failed() >= 3)


def test_the_others_draft_on(built, expected, caplog) -> None:
    engine = built("draft_model,suffix")
    failing(members_of(engine.drafter)["draft_model"], "committed", 5, 10**9)
    with caplog.at_level(logging.WARNING):
        assert_same(expected, run(engine, JOBS))
        assert_same(expected, run(engine, JOBS))
    budget = engine.scheduler.budget
    assert set(budget.wall.off) == {"draft_model"} and not budget.failed
    assert "draft_model failed in committed and is switched off" in spoken(caplog)


@pytest.mark.parametrize(("call", "times"), [("_choose", 1), ("_weigh", 2), ("_weigh", 10**9), ("_choose", 10**9)])
def test_the_budget(built, expected, caplog, call, times) -> None:
    engine = built("draft_model,suffix")
    budget = engine.scheduler.budget
    assert isinstance(budget, Budget)
    failing(budget, call, 6, times)
    with caplog.at_level(logging.WARNING):
        assert_same(expected, run(engine, JOBS))
        assert_same(expected, run(engine, JOBS))
    assert bool(budget.failed) == (times > 2)
    assert "the choice of drafts failed in _choose" in spoken(caplog)
    engine.check()
