"""What a server counts and logs of a budget's choices."""

from __future__ import annotations

import logging

import msgspec
import pytest

from foresay.server.metrics.ring import Ring
from foresay.spec.trace import NOT_PAYING, StepTrace
from tests.server.scripted import STEP
from tests.telemetry.test_verdict import Run

PLAIN = "1.00 tokens in 6.00 ms without drafts"
GAINS = f"Drafting with suffix now: 4.00 tokens in 7.00 ms with 8 drafted by suffix, against {PLAIN}"
UNABLE = "eagle3 cannot draft: the target's hidden states of 32 tokens are missing."
LOSES = f"{NOT_PAYING}: {PLAIN}, against 1.10 tokens in 7.20 ms with 1 drafted by draft_model"


def step(choice: str, news: str = "") -> StepTrace:
    return msgspec.structs.replace(STEP, seconds={"forward": 0.01}, choice=choice, news=news)


def test_steps_are_counted_by_who_was_chosen() -> None:
    ring = Ring()
    for now, choices in enumerate((("none", "suffix", "suffix"), ("suffix+draft_model", ""), ("none",)), start=1):
        for choice in choices:
            ring.at(now).step(step(choice, GAINS if choice == "suffix" else ""))
    span = ring.since(1)
    assert (
        span.spec_decode_num_choices
        == ring.total().spec_decode_num_choices
        == {"none": 2, "suffix": 2, "suffix+draft_model": 1}
    )
    assert span.news is not None and span.news.news == GAINS
    assert ring.since(2).spec_decode_num_choices == {"none": 1, "suffix+draft_model": 1} and ring.since(2).news is None


def test_another_leader_is_logged_once_and_that_none_pays_is_a_warning_once_there_is_evidence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "foresay.speculation")
    run = Run()

    def said(news: str, seconds: float) -> list[tuple[str, str]]:
        caplog.clear()
        run.telemetry.step(step("none" if news.startswith(NOT_PAYING) else "suffix", news))
        run.now += seconds
        run.reporter.report()
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    assert said(GAINS, 10) == [("INFO", GAINS)]
    assert said("", 10) == []
    assert said(LOSES, 10) == [("INFO", LOSES)], "a handful of steps is no evidence"
    assert said("", 300) == []
    for _ in range(3):
        run.steps(70, accepted=0, propose=0.004, forward=0.011)
    assert said(LOSES, 10)[0] == ("WARNING", LOSES)
    assert said(GAINS, 10) == [("INFO", GAINS)]
    assert said(LOSES, 10) == []
    assert said(LOSES, 300) == [("INFO", LOSES)]


async def test_a_drafter_that_cannot_draft_is_on_the_page_and_in_the_log_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, logged = Run(), list[int]()
    for _ in range(40):
        run.telemetry.step(msgspec.structs.replace(step("none"), unable=UNABLE))
        run.telemetry.step(step("none"))
        run.now += 10
        run.reporter.report()
        logged.append(sum(record.getMessage() == UNABLE for record in caplog.records))
        assert (await run.telemetry.snapshot()).verdict == f"Nothing was drafted. {UNABLE}"
    assert logged == [1] * 30 + [2] * 10
    run.now += 60
    run.telemetry.step(step("none"))
    run.now += 1
    assert (await run.telemetry.snapshot()).verdict == "Nothing was drafted."
