"""Whether speculation pays is shown in five ways: by races and in the header of the page, by ``foresay bench``, by
``foresay check --probe``, and in the log. Of a machine whose times are known all of them must say the truth, in one
word."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from foresay.server.cli.main import main
from foresay.server.cli.pair import check
from foresay.server.cli.probe import plain
from foresay.server.metrics.log import Reporter
from foresay.server.metrics.telemetry import Telemetry
from foresay.server.metrics.verdict import judged
from foresay.server.models.service import Service
from foresay.server.settings.config import EngineConfig
from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import needs_chromium, visiting
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
    for module in ("engine_process.local", "cli.probe"):
        monkeypatch.setattr(f"foresay.server.{module}.build_engine", building(script, clock))
    monkeypatch.setattr("foresay.server.cli.probe.PROMPTS", ("a", "b", "c", "d", "e", "f"))
    return script, clock, truth


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A prompt is what was said last, and nothing around it."""
    return byte_level_tokenizer("{{ messages[-1].content }}")


def test_bench_says_the_truth(case, capsys, monkeypatch) -> None:
    script, _, truth = case
    monkeypatch.setattr(Tokenizer, "has_template", False)
    prompts = [flag for letter in "abcd" for flag in ("--prompt", letter)]
    assert main(["bench", "--draft", "ngram", "--max-tokens", "120", "--rounds", "3", *prompts]) == 0
    out = capsys.readouterr().out
    print(out)
    drafted, bare = [float(line.split()[-5]) for line in out.splitlines()[2:4]]
    if truth == UNKNOWN:
        assert "cannot tell how much drafts gain" in out
        return
    [ratio] = map(float, re.findall(r"([\d.]+) times as fast with drafts; both", out))
    assert ratio == pytest.approx(drafted / bare, abs=0.006)
    assert ratio == pytest.approx(script.speed_up, rel=CLOSE)
    assert word(ratio) == truth


def test_the_probe_says_the_truth(case) -> None:
    script, _, truth = case
    report = check(EngineConfig(draft="ngram"), probe_seconds=20)
    text = plain(report)
    print(text)
    output = {
        "writes faster than the target alone": PAYS,
        "slower than the target alone": COSTS,
        "no faster than the target alone": EQUAL,
        "Cannot tell how much it gains": UNKNOWN,
    }
    assert [one for words, one in output.items() if words in text] == [truth]
    if truth != UNKNOWN:
        for one in report.probe:
            assert one.speedup == pytest.approx(script.speed_up, rel=CLOSE)
            assert one.on.tokens_per_second and one.off.tokens_per_second
            assert one.speedup == pytest.approx(one.on.tokens_per_second / one.off.tokens_per_second, rel=0.001)


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


@needs_chromium
@pytest.mark.slow
async def test_the_page_says_the_truth(case, tokenizer) -> None:
    script, clock, truth = case
    async with serving(case, tokenizer) as (url, _), visiting(url) as visit:
        clock.now += 1.0
        await visit.go()
        await visit.ready()
        speed = visit.page.locator("#speed")
        if truth == UNKNOWN:
            await expect(speed).to_contain_text("cannot tell")
        else:
            shown = float((await speed.locator("b").inner_text()).rstrip("×"))
            assert shown == pytest.approx(script.speed_up, rel=CLOSE)
            assert "estimated" in await speed.inner_text()
        races = [await both(url, letter, number) for number, letter in enumerate("abcd")]
        script_of_page = "async races => (await import('/dashboard/static/compare.js')).verdict(races)"
        output, _ = await visit.page.evaluate(script_of_page, races)
    words = {
        "does not pay": COSTS,
        "average [1-9]": PAYS,
        "as fast either way": EQUAL,
        "cannot be told": UNKNOWN,
    }
    assert [one for phrase, one in words.items() if re.search(phrase, output)] == [truth], output


async def both(url: str, prompt: str, number: int) -> dict[str, list[Any]]:
    """Seconds of an answer and of its passes as the page counts them, with drafts and without, in turns."""
    ask = {"prompt": prompt, "max_tokens": 120, "seed": number, "provenance": True}
    ways: list[dict[str, object]] = [{}, {"speculation": {"off": True}}]
    seconds, passes = [0.0, 0.0], [[0.0], [0.0]]
    async with aiohttp.ClientSession() as session:
        for way in (0, 1) if number % 2 else (1, 0):
            async with session.post(f"{url}/v1/completions", json=ask | ways[way]) as response:
                answer = await response.json()
            metrics, steps = answer["metrics"], answer["choices"][0]["provenance"]["steps"]
            seconds[way] = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1000
            passes[way] = [sum(one["ms"].values()) for one in steps]
    return {"seconds": seconds, "passes": passes}
