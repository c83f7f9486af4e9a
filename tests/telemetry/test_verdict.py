"""What the log says: vLLM's words, time saved, and why speculation does not pay."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest

from server.choice import Piece
from server.engine_status import EngineStatus
from server.telemetry.log import EVERY_SECONDS, Reporter
from server.telemetry.plain import TRUSTED
from server.telemetry.telemetry import Telemetry
from server.telemetry.verdict import judged
from spec.request import Delta, EngineInfo, Origin, Request
from spec.sampling import SamplingParams
from spec.trace import StepTrace
from tests.server.scripted import INFO

#: As vLLM prints it, for those who read logs.
VLLM = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>\d+\.\d+), "
    r"Accepted throughput: (?P<accepted_rate>\d+\.\d+) tokens/s, "
    r"Drafted throughput: (?P<drafted_rate>\d+\.\d+) tokens/s, "
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<positions>[\d., ]+), Avg Draft acceptance rate: (?P<rate>\d+\.\d+)%, "
    r"Time saved: (?P<saved>-?\d+\.\d+) s \(estimated, (?P<speed_up>\d+\.\d+)x of plain decoding\)"
)


class Engine:
    """Nothing but what telemetry looks up: an engine that was measured at 10 ms a step without drafts."""

    status = EngineStatus("ready")
    info: EngineInfo | None = msgspec.structs.replace(INFO, root_seconds=0.01)


class Run:
    """A server's telemetry whose clock stands still unless told."""

    def __init__(self) -> None:
        self.now = 5_000.0
        self.telemetry = Telemetry("toy", Engine(), lambda: self.now)
        self.reporter = Reporter(self.telemetry)

    def steps(self, count: int, accepted: int, propose: float, forward: float, drafted: int = 4) -> None:
        """Decode with a chain of ``drafted`` tokens of which so many are accepted."""
        seconds = {"propose": propose, "forward": forward}
        request = Request(id="r", prompt=[1], params=SamplingParams())
        with self.telemetry.watching([request]) as [ledger]:
            for number in range(count):
                self.telemetry.step(
                    StepTrace(
                        number=number,
                        rows=1 + drafted,
                        sequences=1,
                        prefill_rows=0,
                        drafted=drafted,
                        accepted=accepted,
                        emitted=1 + accepted,
                        seconds=seconds,
                    )
                )
                tokens = [5] * (1 + accepted)
                origin = Origin(number, "d", list(range(-1, drafted)), 0, list(range(1, accepted + 1)), seconds)
                ledger.kept(
                    Delta(id="r", tokens=tokens, origin=origin), Piece(token_ids=tokens, offsets=[0] * len(tokens))
                )

    def report(self) -> None:
        self.now += EVERY_SECONDS
        self.reporter.report()


def test_a_line_in_the_words_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps(60, accepted=3, propose=0.004, forward=0.011)
    run.steps(40, accepted=1, propose=0.004, forward=0.011)
    with caplog.at_level(logging.INFO, "foresay.speculation"):
        run.report()
        run.report()
    [record] = caplog.records
    found = VLLM.fullmatch(record.getMessage())
    assert found is not None, record.getMessage()
    assert found.groupdict() == {
        "length": "3.20",
        "accepted_rate": "22.00",
        "drafted_rate": "40.00",
        "accepted": "220",
        "drafted": "400",
        "positions": "1.000, 0.600, 0.600, 0.000",
        "rate": "55.0",
        "saved": "1.70",  # 320 tokens of 10 ms each instead of 100 steps of 15 ms
        "speed_up": "2.13",
    }


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
    for _ in range(3):
        run.steps(30, accepted, propose, forward)
        run.report()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "the same is not said every ten seconds"
    step, needed = 1000 * (propose + forward), 100 * (propose + forward)
    assert warnings[0] == (
        f"Speculation is not paying: a step gives {accepted + 1:.2f} tokens and would have to give {needed:.2f} "
        f"(it takes {step:.2f} ms, {1000 * propose:.2f} ms of them drafting; without drafts 10.00 ms); {why}"
    )


def test_it_warns_again_once_it_has_paid_in_between(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for forward in (0.05, 0.05, 0.01, 0.05):
        run.steps(30, 3, 0.001, forward)
        run.report()
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 2


def test_a_handful_of_steps_says_nothing() -> None:
    run = Run()
    run.steps(5, 0, 0.01, 0.05)
    assert judged(run.telemetry.totals()).pays is None
    assert run.telemetry.verdict().sentence == "Too few steps to tell whether speculation pays."


async def test_steps_without_drafts_are_measured_as_they_happen() -> None:
    run = Run()
    run.steps(TRUSTED - 1, 0, 0.0, 0.02, drafted=0)
    assert run.telemetry.plain_seconds == 0.01
    run.steps(1, 0, 0.5, 0.02, drafted=0)  # what it looked for in vain is not plain decoding's time
    assert run.telemetry.plain_seconds == pytest.approx(0.02)
    run.steps(30, 3, 0.005, 0.025)
    live = (await run.telemetry.snapshot()).live
    assert live.root_seconds == pytest.approx(0.02)
    plain, spent = 30 * 4 * 0.02 + 0.02 + 2 * 0.01, 30 * 0.03 + 3 * 0.02 + 0.5
    assert live.speed_up == pytest.approx(plain / spent)
