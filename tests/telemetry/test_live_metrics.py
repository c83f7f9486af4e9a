"""The real server with the bundled pair: numbers that are shown in several views (in /metrics, by responses, token by
token, on the page, in the log) are one number each; what others make of its metrics; and what it never tells."""

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

from foresay.spec.accept import ByDepth, tokens_per_step
from tests.server.live import LiveServer
from tests.telemetry import page
from tests.telemetry.scraping import Scrape, Sums, scraped

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
EXTRA: Json = {"spec_decode_metrics": "detailed", "provenance": True, "return_token_ids": True}
ASKS: list[Json] = [
    {"prompt": "Once upon a time a xylophone. " * 9, "max_tokens": 60, "temperature": 0},
    {"prompt": "The little fox said", "max_tokens": 64, "temperature": 0.8, "seed": 5, "stop": ["e t", "."]},
    {"prompt": "The little fox said", "max_tokens": 24, "temperature": 1, "seed": 6, "n": 3},
    {"prompt": "Tell me", "max_tokens": 20, "structured_outputs": {"choice": ["once upon a time", "the end of it"]}},
    {"prompt": "One day", "max_tokens": 12, "speculation": {"off": True}},
    # Stop strings of one letter end texts in any place of a run, in the last one too, which the limit has ended.
    *({"prompt": "Then the", "max_tokens": 4 + seed % 9, "seed": seed, "stop": ["a", "i"]} for seed in range(20)),
]


async def posted(session: aiohttp.ClientSession, url: str, ask: Json) -> Json:
    async with session.post(f"{url}/v1/completions", json=ask | EXTRA) as response:
        assert response.status == 200, await response.text()
        body: Json = await response.json()
        return body


class Seen:
    """The requests of a server, and what each of its views shows. state, listed: of the page."""

    def __init__(self, bodies: list[Json], scrape: Scrape, state: Json, listed: list[Json], log: str) -> None:
        self.bodies, self.scrape, self.state, self.listed, self.log = bodies, scrape, state, listed, log

    @property
    def choices(self) -> list[Json]:
        return [choice for body in self.bodies for choice in body["choices"]]


@pytest.fixture(scope="module")
def seen(url: str, live: LiveServer) -> Seen:
    return asyncio.run(_seen(url, live))


async def _seen(url: str, live: LiveServer) -> Seen:
    async with aiohttp.ClientSession() as session:
        bodies = [await posted(session, url, ask) for ask in ASKS]
        bodies += await asyncio.gather(*(posted(session, url, ask) for ask in ASKS))
        drafted = of_metrics(await scraped(url))[0]
        async with asyncio.timeout(120):  # until the log has the last of them
            while sum(int(line["drafted"].replace(",", "")) for line in LINE.finditer(live.output)) < drafted:
                await asyncio.sleep(0.1)

        async def page(name: str) -> Any:
            return await (await session.get(f"{url}/dashboard/{name}")).json()

        tokens, state = sum(body["usage"]["completion_tokens"] for body in bodies), await page("state")
        async with asyncio.timeout(60):  # the last step may have drafted nothing, and its second goes on
            while sum(point["tokens"] for point in state["history"]["seconds"]) < tokens:
                await asyncio.sleep(0.1)
                state = await page("state")
        listed = await page("requests")
    return Seen(bodies, await scraped(url), state, listed, live.output)


@pytest.fixture(scope="module")
def scrape(seen: Seen) -> Scrape:
    return seen.scrape


@pytest.fixture(scope="module")
def sums(seen: Seen) -> Sums:
    """What the responses said."""
    sums = Sums()
    for body in seen.bodies:
        sums.add(body, len(body["choices"]))
    return sums


def of_metrics(scrape: Scrape) -> tuple[float, float, float]:
    names = ("num_draft_tokens", "num_accepted_tokens", "num_discarded_tokens")
    drafted, accepted, discarded = (scrape.sum(f"foresay:spec_decode_{name}_total") for name in names)
    return drafted, accepted, discarded


def test_three_tellings_of_one_number(seen: Seen, sums: Sums) -> None:
    sums.check(seen.scrape)
    steps = [step for choice in seen.choices for step in choice["provenance"]["steps"]]
    responses = (sums.drafted, sums.accepted)
    wire = (sum(step["drafted"] for step in steps), sum(step["accepted"] for step in steps))
    listed = (sum(one["drafted"] for one in seen.listed), sum(one["accepted"] for one in seen.listed))
    assert (responses, wire, listed) == (of_metrics(seen.scrape)[:2],) * 3
    assert sums.accepted > 100 and sums.cached > 0
    drafted = seen.scrape.by("foresay:spec_decode_num_draft_tokens_total", "drafter")
    assert set(drafted) <= {"draft_model", "grammar"} and drafted["draft_model"] > 0
    assert seen.scrape.sum("foresay:spec_decode_num_draft_tokens_per_pos_total") == sum(drafted.values())
    assert of_metrics(seen.scrape)[2] == sum(one["discarded"] for one in seen.listed) > 10, "stop strings cut runs"


def test_tokens_per_step_is_one_number(seen: Seen) -> None:
    """Of all answers together, and of each: in /metrics, twice on the page, by the responses."""
    steps = {
        (body["id"], choice["index"]): len(choice["provenance"]["steps"])
        for body in seen.bodies
        for choice in body["choices"]
    }
    tokens = sum(body["usage"]["completion_tokens"] for body in seen.bodies)
    wanted = tokens_per_step(tokens, sum(steps.values()))
    histogram = "foresay:spec_decode_tokens_per_step"
    assert seen.scrape.sum(f"{histogram}_sum") / seen.scrape.sum(f"{histogram}_count") == wanted
    points = seen.state["history"]["seconds"]
    assert sum(point["tokens"] for point in points) / sum(point["runs"] for point in points) == wanted
    assert sum(one["output_tokens"] for one in seen.listed) / sum(one["steps"] for one in seen.listed) == wanted
    for body in seen.bodies:
        own = sum(steps[body["id"], choice["index"]] for choice in body["choices"])
        assert body["metrics"]["tokens_per_step"] == round(body["usage"]["completion_tokens"] / own, 4)
    each = sorted(round(one["tokens_per_step"], 4) for one in seen.listed)
    written = [(len(choice["token_ids"]), len(choice["provenance"]["steps"])) for choice in seen.choices]
    assert each == sorted(round(length / passes, 4) for length, passes in written)
    plain = [body for body in seen.bodies if body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0]
    assert any(body["metrics"]["tokens_per_step"] == 1 for body in plain), "steps without drafts count"


def test_accepted_by_depth_is_two_numbers(seen: Seen) -> None:
    page = ByDepth(**seen.state["snapshot"]["accepted_by_depth_hour"])
    positions = seen.scrape.by("foresay:spec_decode_num_accepted_tokens_per_pos_total", "position")
    counted = [int(positions[str(place)]) for place in range(len(positions))]
    of_metrics = ByDepth.of(counted, int(seen.scrape.sum("foresay:spec_decode_num_drafts_total")))
    tellings = [body["metrics"]["speculative_decoding"] for body in seen.bodies]
    accepted = [depths for telling in tellings for depths in telling["per_step_accepted"]]
    of_answers = ByDepth.of([sum(one > depth for one in accepted) for depth in range(len(counted))], len(accepted))
    assert page == of_metrics == of_answers
    assert len(page.cumulative) >= 4
    assert page.cumulative[1:] != page.conditional[1:]


LINE = re.compile(
    r"Speculation: (?P<per_step>[\d.]+) tokens per step, (?P<accepted>[\d,]+) of (?P<drafted>[\d,]+) drafted tokens"
)


def test_the_log_agrees(seen: Seen) -> None:
    lines = [found.groupdict() for found in LINE.finditer(seen.log)]
    assert len(lines) == seen.log.count("Speculation: ")
    assert lines
    drafted, accepted, _ = of_metrics(seen.scrape)
    assert sum(int(line["drafted"].replace(",", "")) for line in lines) == drafted
    assert sum(int(line["accepted"].replace(",", "")) for line in lines) == accepted
    rates = [float(line["per_step"]) for line in lines]
    whole, steps = (seen.scrape.sum(f"foresay:spec_decode_tokens_per_step_{part}") for part in ("sum", "count"))
    assert min(rates) - 0.01 <= whole / steps <= max(rates) + 0.01


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


async def test_counters_go_on_when_the_engine_is_started_again(url: str, live: LiveServer, scrape: Scrape) -> None:
    before = await scraped(url)
    [engine] = live.engine_processes()
    os.kill(engine, signal.SIGKILL)
    async with aiohttp.ClientSession() as session, asyncio.timeout(180):
        while (await scraped(url)).sum("foresay:engine_restarts_total") == before.sum("foresay:engine_restarts_total"):
            await asyncio.sleep(0.1)
        while not await ready(session, url):
            await asyncio.sleep(0.2)
        body = await posted(session, url, ASKS[0])
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
