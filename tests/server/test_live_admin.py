"""``foresay reload`` against a real server: who may, what goes on meanwhile, and what the streams say."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest

from foresay.server.cli.main import main
from tests.server.live import LiveServer
from tests.server.patched import PACED, existing, patched_path
from tests.server.wire import until

pytestmark = pytest.mark.slow
KEY = "an-admin-key-of-a-test"
SECONDS = 300.0
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 600, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes engines slow."""
    return tmp_path_factory.mktemp("paced")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    flags = ("--max-model-len", "1024", "--admin-key", KEY, "--engine-timeout", "1800")
    with LiveServer(folder / "log", *flags, variables={"PYTHONPATH": patched_path(PACED, folder)}) as server:
        server.wait_for_url()
        yield server


@pytest.fixture
async def client(server: LiveServer) -> Any:
    async with aiohttp.ClientSession(server.wait_for_url(), timeout=aiohttp.ClientTimeout(total=SECONDS)) as client:
        yield client


async def reload(server: LiveServer, *flags: str) -> tuple[int, str]:
    """The exit status of the command, and all that it says."""
    said = io.StringIO()
    named = mock.patch.dict(os.environ, {"FORESAY_ADMIN_KEY": KEY})
    with named, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        words = ["reload", "--url", server.wait_for_url(), *flags]
        status = await asyncio.wait_for(asyncio.to_thread(main, words), SECONDS)
    return status, said.getvalue()


async def answer(client: aiohttp.ClientSession) -> Any:
    async with client.post("/v1/completions", json=BODY) as response:
        return await response.json()


async def begun(server: LiveServer, client: aiohttp.ClientSession, folder: Path) -> aiohttp.ClientResponse:
    """A stream that has said something, of an engine that was stopped then."""
    with existing(folder / "slow"):
        response = await client.post("/v1/completions", json=BODY | {"stream": True})
        await response.content.readline()
        os.kill(server.engine_processes()[-1], signal.SIGSTOP)  # one before may be ending yet
    return response


async def rest(response: aiohttp.ClientResponse) -> list[Any]:
    """The events that follow."""
    lines = [line.removeprefix(b"data: ") async for line in response.content if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def test_streams_go_on_in_the_next_engine(
    server: LiveServer, client: aiohttp.ClientSession, folder: Path
) -> None:
    right = (await answer(client))["choices"][0]["text"]
    for flags in (["--draft", "ngram"], ["--draft-tokens", "2"]):
        stream = await begun(server, client, folder)
        status, result = await reload(server, *flags)
        assert status == 0 and "1 streams go on after a pause of" in result, result
        events = await rest(stream)
        assert right.endswith(text_of(events)) and len(text_of(events)) > len(right) // 2
        assert events[-1]["metrics"]["resumed"] == 1
        assert "warnings" not in events[-1]
    assert "engine replaced after" in server.output
    async with client.get("/server_info") as response:
        info = await response.json()
    assert info["config"]["draft"] == "ngram" and info["config"]["draft_tokens"] == 2
    assert info["engine"]["drafter"] == "ngram" and info["model"] == "bundled"
    async with client.get("/metrics") as response:
        assert re.search(r'engine_restarts_total{cause="replaced",[^}]*} 2', await response.text())


async def test_an_engine_killed_while_it_loads_its_new_settings_goes_back_to_the_earlier(
    server: LiveServer, client: aiohttp.ClientSession, folder: Path
) -> None:
    right = (await answer(client))["choices"][0]["text"]
    stream, (before,) = await begun(server, client, folder), server.engine_processes()
    with existing(folder / "held"):
        reloading = asyncio.create_task(reload(server, "--draft", "none"))
        await until(lambda: before not in (now := server.engine_processes()) and now)
        os.kill(killed := server.engine_processes()[-1], signal.SIGKILL)
        await until(lambda: killed not in (now := server.engine_processes()) and now)
    status, result = await reloading
    assert status == 2 and "died" in result and "keeps serving" in result, result
    assert right.endswith(text_of(await rest(stream)))
    async with client.get("/server_info") as response:
        assert (await response.json())["config"]["draft"] == "ngram"


async def test_what_cannot_be_is_refused_by_name(server: LiveServer, client: aiohttp.ClientSession) -> None:
    right = (await answer(client))["choices"][0]["text"]
    for flags, named in (
        (["--draft", "/nowhere/at/all"], "--draft"),
        (["--max-model-len", "64"], "max_model_len"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
    ):
        status, result = await reload(server, *flags)
        assert status == 2 and named in result and "keeps serving" in result, result
    for settings, field in (
        ({"draft_tokens": 0}, "draft_tokens"),
        ({"port": 1}, "port"),
        ({"draft": "no:such"}, "draft"),
    ):
        async with client.post(
            "/admin/reload", json={"settings": settings}, headers={"Authorization": f"Bearer {KEY}"}
        ) as response:
            error = (await response.json())["error"]
        assert (response.status, error["type"]) == (400, "invalid_request_error") and field in error["message"], error
    assert (await answer(client))["choices"][0]["text"] == right


@pytest.mark.parametrize(
    ("key", "status", "code"), [(None, 401, "invalid_api_key"), ("another-key-altogether", 403, "admin_key_required")]
)
async def test_only_the_admin_key_opens_it(
    key: str | None, status: int, code: str, client: aiohttp.ClientSession
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with client.post("/admin/reload", json={}, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


@pytest.mark.parametrize(("pause", "end"), [(None, "go on\n"), (0.46, "go on after a pause of 0.5 s\n")])
def test_a_pause_is_named_if_there_was_one(pause: float | None, end: str, monkeypatch: Any, capsys: Any) -> None:
    last = {"status": "replaced", "model": "a", "seconds": 1.0, "moved": 2, "pause": pause}
    monkeypatch.setattr("foresay.server.cli.serve.answers", lambda *given: [last])
    assert main(["reload", "--admin-key", KEY]) == 0 and capsys.readouterr().out.endswith(end)


def test_a_server_of_somebody_else_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for url in (f"http://127.0.0.1:{other.server_port}", "http://127.0.0.1:1", "nonsense", "http://[half"):
            assert main(["reload", "--url", url, "--admin-key", KEY]) == 1
            result = capsys.readouterr().err
            assert re.search(
                rf"--url (http://)?{re.escape(url)}: (this is not a Foresay server|no Foresay server answers)", result
            )
        other.shutdown()
