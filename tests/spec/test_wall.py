"""The wall around drafters: what is caught, what is said, and when a drafter is switched off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from foresay.spec.sequence import SequenceState
from foresay.spec.wall import MOST_FAILURES, BadProposal, Wall
from tests.drafters.texts import sequence

TEXT = [1, 5]


class Failing:
    """Raises what it is given, one call after the other; None: it does not."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors, self.calls = list(errors), 0

    def propose(self, sequences: Sequence[SequenceState]) -> list[int]:
        self._fail()
        return [len(sequences)]

    def committed(self) -> None:
        self._fail()

    def finished(self) -> None:
        self._fail()

    def _fail(self) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "foresay.drafters"]


def test_one_failure_costs_one_draft(caplog) -> None:
    wall, drafter, text = Wall(), Failing(KeyError(3), None, SystemExit(1), None), sequence(TEXT)
    assert wall.ask("pairs", drafter.propose, [text]) is None
    assert text.unable == "pairs cannot draft: it failed, as the log says."
    assert [wall.ask("pairs", drafter.propose, [text]) for _ in range(3)] == [[1], None, [1]]
    (line,) = said(caplog)
    assert line.startswith("pairs failed in propose and drafts nothing in this step: KeyError: 3 (")
    assert "test_wall.py:" in line and caplog.records[0].exc_info
    assert wall.failures == {"pairs": 2} and not wall.off


def test_three_in_a_row_switch_it_off(caplog) -> None:
    wall, text = Wall(), sequence(TEXT)
    drafter = Failing(*[BadProposal("a root is missing")] * 9)
    for _ in range(9):
        assert wall.ask("pairs", drafter.propose, [text]) is None
    assert drafter.calls == MOST_FAILURES == 3
    assert text.unable == wall.off["pairs"]
    assert wall.off["pairs"] == (
        "pairs is switched off until the engine restarts: it failed in propose, as the log says."
    )
    first, last = said(caplog)
    assert first == "pairs failed in propose and drafts nothing in this step: a root is missing"
    assert last == "pairs failed in propose and is switched off until the engine restarts: a root is missing"
    assert not any(record.exc_info for record in caplog.records), "what is wrong with a proposal has no traceback"


@pytest.mark.parametrize("call", [Failing.committed, Failing.finished], ids=lambda call: call.__name__)
def test_what_was_not_told_of_a_text_drafts_no_more(call: Callable[[Failing], None], caplog) -> None:
    wall, drafter = Wall(), Failing(ValueError("full"))
    wall.tell("pairs", getattr(drafter, call.__name__))
    assert wall.ask("pairs", drafter.propose, [sequence(TEXT)]) is None
    wall.tell("pairs", drafter.committed)
    assert drafter.calls == 1
    wall.tell("pairs", drafter.finished)
    assert drafter.calls == 2, "what a text held is freed"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_others_are_not_touched() -> None:
    wall, text = Wall(), sequence(TEXT)
    wall.tell("pairs", Failing(KeyError(1)).committed)
    assert wall.ask("others", Failing().propose, [text]) == [1]
    assert text.unable == ""
