"""What the log says: what was accepted, time saved, why speculation does not pay, and what a budget chose."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest

from foresay.server.engine.generation import EngineStatus
from foresay.server.metrics.log import EVERY_SECONDS, Reporter
from foresay.server.metrics.ring import Ring
from foresay.server.metrics.telemetry import LIVE_SECONDS, Telemetry
from foresay.server.metrics.verdict import CHANGED, _cause, judged
from foresay.server.text.choice import Piece
from foresay.spec.request import Delta, EngineInfo, Origin
from foresay.spec.trace import NOT_PAYING, StepTrace
from tests.server.scripted import INFO, STEP
from tests.telemetry.counted import chosen, kept

LINE = re.compile(
    r"Speculation: (?P<per_step>\d+\.\d+) tokens per step, (?P<accepted>[\d,]+) of (?P<drafted>[\d,]+) drafted tokens "
    r"accepted \((?P<rate>\d+)%\), (?P<speed_up>\d+\.\d+)x the speed of plain decoding \(estimated; (?P<known>.*)\)"
)


class Engine:
    """Nothing but what telemetry looks up: an engine that was measured at 10 ms a step without drafts."""

    status = EngineStatus("ready")
    info: EngineInfo | None = msgspec.structs.replace(INFO, root_seconds=0.01)


class Run:
    """A server's telemetry whose clock stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 5_000.0
        self.telemetry = Telemetry("toy", Engine(), lambda: self.now)
        self.reporter = Reporter(self.telemetry)

    def steps(
        self,
        count: int,
        accepted: int,
        propose: float,
        forward: float,
        drafted: int = 4,
        crowded: float = 0.0,
        unsure: bool = False,
    ) -> None:
        """Decode with a chain of ``drafted`` tokens of which so many are accepted. A step without drafts: 10 ms."""
        seconds = {"propose": propose, "forward": forward}
        with self.telemetry.watching([chosen()]) as [stats]:
            for number in range(count):
                counts = {"rows": 1 + drafted, "drafted": drafted, "accepted": accepted, "emitted": 1 + accepted}
                timed: dict[str, object] = {"seconds": seconds, "root_seconds": 0.01, "crowded": crowded}
                self.telemetry.step(msgspec.structs.replace(STEP, **counts, **timed, unsure=unsure))
                tokens = [5] * (1 + accepted)
                origin = Origin(number, "d", list(range(-1, drafted)), 0, list(range(1, accepted + 1)), seconds)
                piece = Piece(token_ids=tokens, offsets=[0] * len(tokens))
                kept(stats, Delta(id="r", tokens=tokens, origin=origin), piece)

    def report(self) -> None:
        self.now += EVERY_SECONDS
        self.reporter.report()


def test_a_line_for_people(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps(60, accepted=3, propose=0.004, forward=0.011)
    run.steps(40, accepted=1, propose=0.004, forward=0.011)
    with caplog.at_level(logging.INFO, "foresay.speculation"):
        run.report()
        run.report()
    [record] = caplog.records
    found = LINE.fullmatch(record.getMessage())
    assert found is not None, record.getMessage()
    assert found.groupdict() == {
        "per_step": "3.20",
        "accepted": "220",
        "drafted": "400",
        "rate": "55",
        "speed_up": "2.13",
        "known": "1.70 s saved",  # 320 tokens of 10 ms each instead of 100 steps of 15 ms
    }
    assert len(record.getMessage()) < 160, "what it says of each depth is in /metrics"


@pytest.mark.parametrize(
    ("accepted", "propose", "forward", "why"),
    [
        (1, 0.002, 0.030, "only 25% of the drafts are accepted: try another --draft, or fewer --draft-tokens"),
        (3, 0.040, 0.015, "drafting takes 73% of the time: try a smaller --draft, or fewer --draft-tokens"),
        (3, 0.005, 0.050, "verifying 5.0 rows at once costs too much here: try fewer --draft-tokens"),
    ],
)
def test_a_warning_says_why_it_does_not_pay(
    caplog: pytest.LogCaptureFixture, accepted: int, propose: float, forward: float, why: str
) -> None:
    run = Run()
    for _ in range(5):
        run.steps(70, accepted, propose, forward)
        run.report()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "the same is not said every ten seconds"
    step = 1000 * (propose + forward)
    assert warnings[0] == (
        f"Speculation is not paying: a token takes {step / (accepted + 1):.2f} ms, and would take 10.00 ms without "
        f"drafts (a step takes {step:.2f} ms, {1000 * propose:.2f} ms of them drafting); {why}."
    )


@pytest.mark.parametrize(("accepted", "propose"), [(1, 0.002), (3, 0.04), (3, 0.005)])
def test_a_length_that_is_chosen_for_each_step_is_not_to_be_lowered(accepted: int, propose: float) -> None:
    run = Run()
    run.steps(300, accepted, propose, 0.05)
    window = run.telemetry.totals()
    assert _cause(window).endswith("fewer --draft-tokens")
    window.spec_decode_num_choices = {"draft_model": 300}
    assert _cause(window).endswith("--draft none")


def test_it_warns_again_once_it_has_paid_in_between(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for forward in (0.05, 0.05, 0.01, 0.05):
        for _ in range(3):
            run.steps(70, 3, 0.001, forward)
        run.report()
        run.now += LIVE_SECONDS
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 2


def test_a_handful_of_steps_says_nothing() -> None:
    run = Run()
    run.steps(5, 0, 0.01, 0.05)
    assert judged(run.telemetry.totals()).pays is None
    assert judged(run.telemetry.minute()).sentence == "Too few steps to tell whether speculation pays."


@pytest.mark.parametrize(("requests", "steps", "pays"), [(3, 67, False), (3, 66, None), (2, 150, None), (1, 500, None)])
async def test_that_it_does_not_pay_takes_200_steps_of_3_requests(requests: int, steps: int, pays: bool | None) -> None:
    losing, paying = Run(), Run()
    for _ in range(requests):
        losing.steps(steps, 0, 0.002, 0.050)
        paying.steps(20, 3, 0.002, 0.010)
    verdict = judged(losing.telemetry.minute())
    assert verdict.pays is pays
    assert (verdict.sentence == "Too few steps to tell whether speculation pays.") is (pays is None)
    assert bool((await losing.telemetry.snapshot()).live.doubt) is (pays is None), "a figure of chance alone is none"
    assert judged(paying.telemetry.minute()).pays, "what pays is said as soon as before"


def test_an_estimate_of_another_pace_is_unsure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foresay.speculation")
    run = Run()
    run.steps(30, 1, 0.002, 0.050, unsure=True)
    verdict = judged(run.telemetry.minute())
    assert (verdict.pays, verdict.sentence) == (None, f"Cannot tell whether speculation pays: {CHANGED}.")
    run.report()
    [line] = [record.getMessage() for record in caplog.records]  # no advice to change flags
    assert line.endswith(f"cannot tell: {CHANGED})")
    for _ in range(2):
        run.steps(100, 1, 0.002, 0.050)
    assert judged(run.telemetry.minute()).pays is False, "most of the minute is sure"


def test_where_hardly_anything_is_drafted_drafts_are_not_to_blame() -> None:
    run = Run()
    run.steps(1, 0, 0.002, 0.012)
    run.steps(400, 0, 0.0, 0.014, drafted=0)
    verdict = judged(run.telemetry.minute())
    assert (verdict.pays, verdict.sentence) == (None, "Hardly anything was drafted.")


async def test_the_figures_are_of_the_last_minute_in_which_anything_ran() -> None:
    run = Run()
    live = (await run.telemetry.snapshot()).live
    assert (live.tokens_per_second, live.time_to_first_token.mean, live.until) == (None, None, int(run.now))
    with run.telemetry.watching([chosen()]) as [stats]:
        for number in range(1, 4):
            run.telemetry.step(msgspec.structs.replace(STEP, emitted=2, seconds={"forward": 0.1}))
            stats.delivered(2)
            piece = Piece(token_ids=[5, 5], offsets=[0, 0], finish_reason="stop" if number == 3 else None)
            kept(stats, Delta(id="r", tokens=[5, 5]), piece)
            run.now += 0.125
    ran = await run.telemetry.snapshot()
    assert ran.live.tokens_per_second == pytest.approx(6 / 0.3)
    assert ran.live.time_to_first_token.mean == pytest.approx(0)
    assert ran.live.chunk_gap.mean == pytest.approx(0.125)
    assert ran.live.time_per_token.mean == pytest.approx(0.125 / 2)
    run.now += 3600
    idle = await run.telemetry.snapshot()
    assert idle.live == ran.live, "an idle server shows what it did last"
    assert idle.verdict == ran.verdict


async def test_a_busy_machine_is_named_at_once_and_not_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "foresay.speculation")
    run = Run()
    run.steps(10, accepted=3, propose=0.004, forward=0.011, crowded=0.2)
    run.report()
    assert (await run.telemetry.snapshot()).live.crowded == pytest.approx(0)  # that was ten seconds ago
    assert not caplog.records, "another process of ours is no reason to worry anybody"
    for _ in range(3):
        run.steps(10, accepted=3, propose=0.004, forward=0.011, crowded=0.5)
        assert (await run.telemetry.snapshot()).live.crowded == pytest.approx(0.5)
        run.report()
    [warning] = [record for record in caplog.records if "busy" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        "Other programs keep this machine busy: the engine spends 50% of its time waiting for a CPU core."
    )
    assert run.telemetry.totals().step_wait_seconds == pytest.approx(0.15 * 0.2 + 3 * 0.15 * 0.5)


# -- a budget's choices ------------------------------------------------------------------------------------------------


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
