"""Every file in examples/ runs as it stands against a real server, whatever its model is called."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from tests.dashboard.browsing import CHROMIUM, PATIENCE, SWITCHES
from tests.server.live import LiveServer
from tests.telemetry.scraping import Scrape

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GUIDELLM = Path(sys.prefix) / "guidellm" / "bin" / "guidellm"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def page_origin() -> Iterator[str]:
    """Where the page is, which is not where the API is."""
    handler = functools.partial(_Quiet, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_port}"
        files.shutdown()


@pytest.fixture(scope="module")
def url(page_origin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--max-seqs", "4", "--served-model-name", "story", "--cors-origin", page_origin)
    with LiveServer(tmp_path_factory.mktemp("serve") / "log", *flags) as server:
        yield server.wait_for_url()


def run(url: str, *command: str, **more: str) -> str:
    environment = os.environ | {"FORESAY_URL": url, "PYTHONPATH": ""} | more
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(url: str, name: str) -> str:
    return run(url, sys.executable, "-W", "error::DeprecationWarning", str(EXAMPLES / name))


def answered(url: str) -> float:
    """How many requests the server answered to their end."""
    with urllib.request.urlopen(f"{url}/metrics") as metrics:
        ends = Scrape(metrics.read().decode()).by("foresay:request_success_total", "finished_reason")
    return ends.get("length", 0) + ends.get("stop", 0)


def test_openai_sync(url):
    answers, drafting = python(url, "openai_sync.py").rstrip("\n").rsplit("\n", 1)
    half = len(answers) // 2
    assert answers[:half] and answers == f"{answers[:half]}\n{answers[:half]}"
    assert drafting.endswith("a step")


def test_openai_async(url):
    assert python(url, "openai_async.py").count("---") == 3


def test_openai_websocket(url):
    output = python(url, "openai_websocket.py")
    warm = [int(line.split(" in, ")[1].split()[0]) for line in output.splitlines() if line.startswith("[")]
    assert len(warm) == 2 and warm[1] > 0, output


def test_curl(url):
    output = run(url, "sh", str(EXAMPLES / "curl.sh"))
    *_, logprobs, animal = [line for line in output.splitlines() if line.startswith("{")]
    assert len(json.loads(logprobs)["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
    answer = json.loads(json.loads(animal)["choices"][0]["message"]["content"])
    assert answer["animal"] in ("fox", "owl") and 0 <= answer["age"] <= 99
    assert "data: [DONE]" in output


def test_curl_shows_what_is_wrong(url):
    environment = os.environ | {"FORESAY_URL": url, "MODEL": "tale"}
    done = subprocess.run(["sh", str(EXAMPLES / "curl.sh")], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "The model 'tale' was not found" in done.stdout


def test_langchain(url):
    assert "kind=" in python(url, "langchain_chat.py")


def test_predicted_shape(url):
    assert "needs_confirmation_by_a_person=" in python(url, "predicted_shape.py")


@pytest.mark.outside
@pytest.mark.skipif(not GUIDELLM.exists() and not os.environ.get("CI"), reason="make outside installs GuideLLM")
def test_guidellm_as_one_user(url, tmp_path):
    """GuideLLM 0.8.1 stops reading as soon as the last answer is counted, so that on a busy machine its report may lack
    that one (a pause between its `receive_callback` and its `sync_put` shows it): how many were answered is read here.
    """
    before = answered(url)
    report = tmp_path / "report.json"
    run(url, "sh", str(EXAMPLES / "guidellm.sh"), GUIDELLM=str(GUIDELLM), REPORT=str(report))
    assert answered(url) - before == 5
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    assert (benchmark["requests"]["errored"], benchmark["requests"]["incomplete"]) == ([], [])
    assert benchmark["metrics"]["request_totals"]["successful"] in (4, 5)


@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs Chromium (apt install chromium)")
async def test_a_page_of_another_origin_streams_both_ways(page_origin, url):
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=SWITCHES, timeout=PATIENCE)
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        await page.goto(f"{page_origin}/browser.html?url={url}")
        for place in ("#events", "#socket"):
            await page.wait_for_selector(f"{place}[data-done=yes]", state="attached", timeout=PATIENCE)
            assert (await page.inner_text(place)).strip()
        assert [line for line in complaints if "favicon" not in line and "404" not in line] == []
        await browser.close()


def test_every_example_is_listed_and_tested():
    listed = (EXAMPLES / "README.md").read_text()
    tested = Path(__file__).read_text()
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md")
    assert [name for name in names if f"({name})" not in listed] == []
    # AIPerf brings 140 packages, more than a test may: it was run by hand, its table is in the README.
    assert [name for name in names if name not in tested and name != "aiperf.sh"] == []
