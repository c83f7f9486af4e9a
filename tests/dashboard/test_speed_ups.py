"""Whether speculation pays is said by ``foresay bench``, in the log and on the page. Of a machine whose times are known
all of them must say the truth, in one word."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from foresay.server.cli.main import main
from foresay.server.metrics.log import Reporter
from foresay.server.metrics.telemetry import Telemetry
from foresay.server.metrics.verdict import judged
from foresay.server.models.service import Service
from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.timed import Clock, Script, Stepping, building, engine
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import served

PAYS, COSTS, EQUAL, UNKNOWN = "pays", "costs", "equal", "cannot tell"
SCRIPTS = {
    "pays": (Script(plain=0.010, drafting=0.004, verifying=0.016, right=2), False, PAYS),
    "costs": (Script(plain=0.010, drafting=0.010, verifying=0.015, right=1), False, COSTS),
    "as fast": (Script(plain=0.010, drafting=0.010, verifying=0.010, right=1), False, EQUAL),
    "in one step": (Script(plain=0.010, drafting=0.004, verifying=0.016, right=3, ends=True), False, PAYS),
    "busy": (Script(plain=0.010, drafting=0.004, verifying=0.016, right=2), True, UNKNOWN),
}
#: The last step of an answer may bring fewer tokens than the others.
CLOSE = 0.03


def word(ratio: float, margin: float = 1.03) -> str:
    return PAYS if ratio > margin else COSTS if ratio < 1 / margin else EQUAL


@pytest.fixture(params=SCRIPTS)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Script, Clock, str]:
    script, wild, truth = SCRIPTS[request.param]
    clock = Clock(wild)
    clock.give(monkeypatch)
    monkeypatch.setattr("foresay.server.engine_process.local.build_engine", building(script, clock))
    return script, clock, truth


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A prompt is what was said last, and nothing around it."""
    return byte_level_tokenizer("{{ messages[-1].content }}")


@pytest.mark.parametrize("case", ["pays", "costs", "busy"], indirect=True)
def test_bench_says_the_truth(case, capsys, monkeypatch) -> None:
    script, _, truth = case
    monkeypatch.setattr(Tokenizer, "has_template", False)
    prompts = [flag for letter in "abcd" for flag in ("--prompt", letter)]
    assert main(["bench", "--draft", "ngram", "--max-tokens", "120", "--rounds", "2", *prompts]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[2:4]]
    drafted, bare = [float(row[1]) for row in rows]
    if truth == UNKNOWN:
        assert "ngram: cannot tell how much it gains: " in out
        return
    ratio = float(rows[0][-1])
    assert ratio == pytest.approx(drafted / bare, abs=0.006)
    assert ratio == pytest.approx(script.speed_up, rel=CLOSE)
    assert word(ratio) == truth


@asynccontextmanager
async def serving(case, tokenizer: Tokenizer) -> AsyncIterator[tuple[str, Service]]:
    """A server that has answered for a while; its address, and what counts."""
    script, clock, _ = case
    stepping, services = Stepping(engine(script, clock)), list[Service]()

    def on_our_clock(service: Service) -> None:
        old = service.telemetry
        service.telemetry = Telemetry("toy", stepping, clock, old.connections)
        service.telemetry.self_check = old.self_check
        stepping.observe = service.telemetry.step
        services.append(service)

    async with served(stepping, tokenizer, on_our_clock) as client:
        url = str(client.make_url("")).rstrip("/")
        async with aiohttp.ClientSession() as session:
            for number in range(300 if script.ends else 8):
                ask = {"prompt": "abcdefgh"[number % 8], "max_tokens": 120, "seed": number}
                async with session.post(f"{url}/v1/completions", json=ask) as response:
                    assert response.status == 200, await response.text()
        yield url, services[0]


async def test_the_log_and_the_verdict_say_the_truth(case, tokenizer, caplog) -> None:
    script, clock, truth = case
    caplog.set_level(logging.INFO, "foresay.speculation")
    async with serving(case, tokenizer) as (_, service):
        reporter = Reporter(service.telemetry)
        reporter._reported = 0
        clock.now += 1.0
        reporter.report()
        live = (await service.telemetry.snapshot()).live
    line = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Speculation: ")][-1]
    print(line, judged(service.telemetry.minute()))
    verdict = judged(service.telemetry.minute())
    if truth == UNKNOWN:
        assert verdict.sentence.startswith("Cannot tell whether speculation pays: ")
        assert re.search(r"\(estimated; cannot tell: .*\)$", line)
        return
    [shown] = re.findall(r"([\d.]+)x the speed of plain decoding \(estimated; [\d.]+ s (?:lost|saved)\)", line)
    assert float(shown) == pytest.approx(script.speed_up, rel=CLOSE)
    assert live.speed_up == pytest.approx(float(shown), abs=0.006)
    assert {"pays: ": PAYS, "is not paying": COSTS, "neither pays nor": EQUAL}[
        next(words for words in ("pays: ", "is not paying", "neither pays nor") if words in verdict.sentence)
    ] == truth
