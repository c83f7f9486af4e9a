"""Observers see what happened in order, once its tokens are on their way, and harm nobody."""

from __future__ import annotations

import pytest

from foresay.spec.observer import Observer
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from tests.spec.harness import Harness
from tests.spec.tables import TableModel


class Order(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def stepped(self, trace, results) -> None:
        self.seen.append(f"step {trace.number}")

    def ended(self, sequence: SequenceState) -> None:
        self.seen.append(f"ended {sequence.id}")


def test_events_come_in_order_and_after_the_tokens() -> None:
    harness = Harness(TableModel(5), observers=[order := Order()])
    harness.engine.add(Request(id="a", prompt=[1, 2], params=SamplingParams(max_tokens=9, seed=1)))
    deltas = harness.engine.step()
    assert order.seen == [], "the step is reported when its tokens are on their way"
    assert deltas[0].tokens
    harness.engine.step()
    assert order.seen == ["step 1"]
    harness.engine.cancel("a")
    harness.engine.notify()
    assert order.seen == ["step 1", "step 2", "ended a"]


class Failing(Observer):
    def stepped(self, trace, results) -> None:
        raise ValueError("it looked too closely")


def test_an_observer_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(TableModel(5), observers=[Failing(), order := Order()])
    assert len(harness.answer([1, 2], SamplingParams(max_tokens=5, seed=1)).tokens) == 5
    assert order.seen == [*(f"step {number}" for number in range(1, 6)), "ended only"]
    (record,) = caplog.records
    assert "Failing failed" in record.message
