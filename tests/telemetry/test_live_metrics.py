"""The real server with the bundled pair: what it counts, what others make of its metrics, and what it never tells."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.live import LiveServer
from tests.telemetry import page
from tests.telemetry.scraping import Scrape, Sums, scraped

ROOT = Path(__file__).resolve().parents[2]
SECRET = "xylophone"
ASKS: list[dict[str, Any]] = [
    {"prompt": f"Once upon a time a {SECRET}. " * 9, "max_tokens": 40, "temperature": 0},
    {"prompt": "The little fox said", "max_tokens": 48, "temperature": 0.8, "seed": 5, "stop": ["e t"], "stream": True},
    {"prompt": "The little fox said", "max_tokens": 24, "temperature": 1, "seed": 6, "n": 3},
    {"prompt": ["One day", "Then the"], "max_tokens": 16, "stream": True, "stop": ["a"]},
    {"prompt": "Tell me", "max_tokens": 20, "structured_outputs": {"choice": ["once upon a time", "the end of it"]}},
]


async def asked(session: aiohttp.ClientSession, url: str, ask: dict[str, Any]) -> dict[str, Any]:
    """The usage and metrics of a response."""
    body = ask | {"spec_decode_metrics": "detailed"}
    if ask.get("stream"):
        body["stream_options"] = {"include_usage": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    last: dict[str, Any] = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if ask.get("stream") else text)
    return last


def choices(ask: dict[str, Any]) -> int:
    count: int = ask.get("n", 1) * (len(ask["prompt"]) if isinstance(ask["prompt"], list) else 1)
    return count


@pytest.fixture(scope="module")
def sums() -> Sums:
    """What the responses of this module said so far."""
    return Sums()


@pytest.fixture(scope="module")
def scrape(url: str, sums: Sums) -> Scrape:
    """After some traffic of every kind, one by one and all at once."""
    return asyncio.run(after_traffic(url, sums))


async def after_traffic(url: str, sums: Sums) -> Scrape:
    async with aiohttp.ClientSession() as session:
        for ask in ASKS:
            sums.add(await asked(session, url, ask), choices(ask))
        for ask, body in zip(ASKS, await asyncio.gather(*(asked(session, url, ask) for ask in ASKS)), strict=True):
            sums.add(body, choices(ask))
    return await scraped(url)


def test_the_counters_are_the_sums_of_the_responses(scrape: Scrape, sums: Sums) -> None:
    sums.check(scrape)
    assert sums.accepted > 0 and sums.cached > 0
    drafted = scrape.by("foresay:spec_decode_num_draft_tokens_total", "drafter")
    assert set(drafted) <= {"draft_model", "grammar"} and drafted["draft_model"] > 0
    assert scrape.sum("foresay:spec_decode_num_draft_tokens_per_pos_total") == sum(drafted.values())


def test_steps_phases_and_gauges(scrape: Scrape, sums: Sums) -> None:
    steps = scrape.sum("foresay:engine_steps_total")
    assert 0 < steps == scrape.sum("foresay:step_seconds_count")
    phases = scrape.by("foresay:step_phase_seconds_total", "phase")
    assert {"plan", "propose", "mask", "forward", "draw", "commit", "deliver"} == set(phases)
    engine = sum(seconds for phase, seconds in phases.items() if phase != "deliver")
    assert engine == pytest.approx(scrape.sum("foresay:step_seconds_sum"))
    assert 0 < scrape.sum("foresay:decode_seconds_total") <= engine
    assert scrape.sum("foresay:plain_step_seconds") > 0
    assert scrape.sum("foresay:time_per_output_token_seconds_sum") == pytest.approx(
        scrape.sum("foresay:inter_chunk_latency_seconds_sum")
    )
    assert scrape.sum("foresay:time_to_first_token_seconds_count") == sums.choices
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert scrape.sum(f"vllm:{name}") == scrape.sum(f"foresay:{name}") == 0
    assert scrape.sum("foresay:kv_cache_kept_perc") > 0
    assert scrape.sum("foresay:engine_up") == 1
    startup = scrape.by("foresay:startup_time_seconds", "phase")
    assert startup.pop("total") == pytest.approx(sum(startup.values()), abs=0.5)
    assert "reading_the_target's_weights" in startup  # exactness may have been probed by an earlier server


async def test_every_answer_is_decoded_again_and_no_other_metric_knows(url: str, scrape: Scrape, sums: Sums) -> None:
    async with asyncio.timeout(240):
        while (now := await scraped(url)).sum("foresay:self_check_requests_total") < sums.choices:
            await asyncio.sleep(0.2)
    assert now.sum("foresay:self_check_requests_total") == sums.choices
    assert now.sum("foresay:self_check_tokens_total") >= sums.output > 0
    assert now.sum("foresay:self_check_mismatch_total") == now.sum("foresay:self_check_skipped_total") == 0
    sums.check(now)
    for name in ("engine_steps_total", "step_seconds_sum", "step_phase_seconds_total", "decode_seconds_total"):
        assert now.sum(f"foresay:{name}") == scrape.sum(f"foresay:{name}"), name


#: Of ``iteration_tokens_total``, as vLLM calls its histogram.
VLLMS = 'non-counter metrics should not have "_total" suffix'


def test_promtool_has_nothing_to_say_but_that_names_have_colons(scrape: Scrape) -> None:
    result = promtool(scrape.text).splitlines()
    assert [line for line in result if not line.endswith(("metric names should not contain ':'", VLLMS))] == []
    result = promtool(scrape.text.replace("foresay:", "foresay_").replace("vllm:", "vllm_")).splitlines()
    assert [line for line in result if not line.endswith(VLLMS)] == []


def promtool(text: str) -> str:
    """What ``promtool check metrics`` says."""
    program = shutil.which("promtool")
    if program is None:
        assert os.environ.get("CI") != "true", "promtool is missing; install Debian's prometheus package"
        pytest.skip("promtool is not installed (Debian's prometheus package has it)")
    found = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert found.returncode in (0, 3), found.stderr
    return found.stdout + found.stderr


def test_every_metric_of_the_grafana_board_is_in_the_scrape(scrape: Scrape) -> None:
    board = json.loads((ROOT / "grafana" / "foresay.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [entry["query"] for entry in board["templating"]["list"] if entry["type"] == "query"]
    named = {name for text in [*targets, *variables] for name in re.findall(r"foresay:\w+", text)}
    assert len(named) > 30
    assert named - scrape.samples.keys() == set()
    labels = {label for text in targets for label in re.findall(r"by \((\w+)\)", text)} - {"le"}
    known = {label for series in scrape.samples.values() for have in series for label, _ in have}
    assert labels and labels <= known
    first = next(panel for panel in board["panels"] if panel["type"] == "row")
    assert (first["title"], first["gridPos"]["y"]) == ("Does speculation pay?", 0)


def test_the_page_about_metrics_is_current() -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.renewed(text) == text, "python -m tests.telemetry.page"


def test_every_metric_is_in_the_scrape_as_it_is_declared(scrape: Scrape) -> None:
    suffixes = {"counter": "_total", "gauge": "", "histogram": "_count"}
    declared = {name: metric for name, metric in page.METRICS.items() if not name.startswith("replica_")}
    reported = {f"foresay:{name}{suffixes[metric.kind]}": metric for name, metric in declared.items()}
    made = {name for name in scrape.types if not re.search("_(bucket|sum|created)$", name)}
    assert {name for name in made if name.startswith("foresay:")} == set(reported)
    for name, metric in reported.items():
        assert scrape.types[name] == metric.kind
        has = {label for have in scrape.samples[name] for label, _ in have} - {"model_name", "engine"}
        assert has == set(metric.labels), name
    aliases = {name.removeprefix("vllm:") for name in made if name.startswith("vllm:")}
    assert aliases == {
        (name if metric.vllm is True else metric.vllm) + suffixes[metric.kind]
        for name, metric in declared.items()
        if metric.vllm
    }


def test_metrics_hold_no_text(scrape: Scrape) -> None:
    assert SECRET not in scrape.text and "Once upon" not in scrape.text


async def test_counters_go_on_when_the_engine_is_started_again(url: str, live: LiveServer, scrape: Scrape) -> None:
    before = await scraped(url)
    [engine] = live.engine_processes()
    os.kill(engine, signal.SIGKILL)
    async with aiohttp.ClientSession() as session, asyncio.timeout(180):
        while (await scraped(url)).sum("foresay:engine_restarts_total") == before.sum("foresay:engine_restarts_total"):
            await asyncio.sleep(0.1)
        while not await ready(session, url):
            await asyncio.sleep(0.2)
        body = await asked(session, url, ASKS[0])
    after = await scraped(url)
    assert after.sum("foresay:engine_up") == 1
    assert after.sum("foresay:engine_restarts_total") == before.sum("foresay:engine_restarts_total") + 1
    shrunk = [
        (name, labels)
        for name, series in before.samples.items()
        for labels, value in series.items()
        if name.endswith(("_total", "_count", "_bucket", "_sum")) and after.samples[name][labels] < value
    ]
    assert shrunk == []
    gained = after.sum("vllm:generation_tokens_total") - before.sum("vllm:generation_tokens_total")
    assert gained == body["usage"]["completion_tokens"]


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/ready") as response:
        return response.status == 200
