"""Reloads whose client leaves in the middle are finished all the same: settings, template and weights agree."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from foresay.server.settings.resolved import BUNDLED
from tests.server.live import LiveServer

pytestmark = pytest.mark.slow
KEY = "an-admin-key-of-a-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}
#: Where the client leaves: at the first line that says so.
MOMENTS = ["checking the files", "starting the engine process", "packing the target's weights"]


@pytest.fixture
def targets(tmp_path: Path) -> list[Path]:
    """Two of the same shape and the same tokens, whose templates and weights differ."""
    one, two = (shutil.copytree(BUNDLED / "target", tmp_path / name) for name in ("one", "two"))
    template = two / "chat_template.jinja"
    template.write_text("a wholly different beginning " + template.read_text())
    weights = load_file(two / "model.safetensors")
    save_file(weights | {"model.norm.weight": -weights["model.norm.weight"]}, two / "model.safetensors")
    return [one, two]


@pytest.fixture
async def client(targets: list[Path], tmp_path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, LiveServer]]:
    """Of a server in which a new engine can only start once the one before has ended."""
    flags = [str(targets[0]), "--draft", "suffix", "--max-model-len", "512", "--admin-key", KEY]
    flags += ["--served-model-name", "m", "--engine-timeout", "1800", "--draft-history", str(tmp_path / "history")]
    with LiveServer(tmp_path / "log", *flags) as server:
        url = await asyncio.to_thread(server.wait_for_url)
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=300)) as client:
            yield client, server


async def cut(client: aiohttp.ClientSession, target: Path, moment: str) -> None:
    """Ask for a reload, and leave in the middle."""
    body = {"settings": {"target": str(target)}, "stream": True}
    async with client.post("/admin/reload", json=body, headers=HEADERS) as response:
        async for line in response.content:
            if json.loads(line).get("phase") == moment:
                response.close()
                return
    pytest.fail(f"{moment!r} was not reported")


async def shown(client: aiohttp.ClientSession) -> tuple[str, str, int, str]:
    """The target by the settings and by the engine, how long the template makes a prompt, what the model writes."""
    async with client.get("/server_info") as response:
        info = await response.json()
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        answer = await response.json()
    result = answer["choices"][0]["message"]["content"]
    return info["config"]["target"], info["engine"]["target"], answer["usage"]["prompt_tokens"], result


async def replaced(client: aiohttp.ClientSession, server: LiveServer, times: int) -> None:
    """Until the engine was replaced so often, and the server takes requests and another reload."""
    async with asyncio.timeout(120):
        while server.output.count("engine replaced after") < times:
            await asyncio.sleep(0.05)
        while (await reloaded(client, port=1))[0] == 409:
            await asyncio.sleep(0.05)


async def reloaded(client: aiohttp.ClientSession, **settings: Any) -> tuple[int, Any]:
    async with client.post("/admin/reload", json={"settings": settings}, headers=HEADERS) as response:
        return response.status, await response.json()


async def test_a_reload_is_finished_whenever_its_client_leaves(
    client: tuple[aiohttp.ClientSession, LiveServer], targets: list[Path]
) -> None:
    session, server = client
    right = {targets[0]: await shown(session)}
    for times, moment in enumerate(MOMENTS, start=1):
        target = targets[times % 2]
        await cut(session, target, moment)
        await replaced(session, server, times)
        found = await shown(session)
        assert found[:2] == (str(target), str(target)), moment
        assert found == right.setdefault(target, found), moment
    one, two = (right[target] for target in targets)
    assert one[2] < two[2] and one[3] != two[3], "a template and weights of its own"
    status, answer = await reloaded(session, draft="suffix,ngram")
    assert (status, answer.get("status")) == (200, "replaced"), answer
    assert await shown(session) == two, "another draft leaves the target alone"
    assert "Task was destroyed" not in server.output and "Traceback" not in server.output
    assert len(server.engine_processes()) == 1
