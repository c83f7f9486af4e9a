"""A request that was accepted before the engine died, and is still being prepared then, runs in the next engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.http.app import create_app
from foresay.server.models.models import MODELS, Models
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED
from tests.server.wire import until

pytestmark = pytest.mark.slow
SECONDS = 180.0
#: Takes some tenths of a second where the last message is a long one.
SLOW = (
    "{% if messages[-1].content|length > 40 %}{% for i in range(9000) %}{% for j in range(400) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
PROMPT = "Once upon a time there was a fox who had a long story to tell"


class Started:
    """Starts engine processes; those after the first are stopped until the test has them go on."""

    def __init__(self) -> None:
        self.processes = list[int]()

    def __call__(self) -> Spawned:
        made = spawn()
        if self.processes:
            os.kill(made.process.pid, signal.SIGSTOP)
        self.processes.append(made.process.pid)
        return made


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[tuple[TestClient, Started]]:
    target = shutil.copytree(BUNDLED / "target", tmp_path / "target")
    template = target / "chat_template.jinja"
    template.write_text(SLOW + template.read_text())
    started = Started()
    config = ServeConfig(target=str(target), draft="none", max_model_len=256, max_seqs=2, engine_timeout=10 * SECONDS)
    models = Models.of(config, lambda status: None, started)
    async with TestClient(TestServer(create_app(models))) as client:
        await models.start()
        try:
            await asyncio.wait_for(models.arrived(), SECONDS)
            yield client, started
        finally:
            await models.stop()


async def ask(client: TestClient, content: str) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "seed": 3}
    async with client.post("/v1/chat/completions", json=body | {"ignore_eos": True}) as response:
        answer = await response.json()
    return response.status, answer["choices"][0]["message"] if response.status == 200 else answer["error"]["code"]


async def test_it_waits_for_the_next_engine_and_new_ones_are_refused(serving: tuple[TestClient, Started]) -> None:
    client, started = serving
    entry = client.app[MODELS].first
    right = await ask(client, PROMPT)
    assert right[0] == 200
    early = [asyncio.create_task(ask(client, PROMPT)) for _ in range(3)]
    while entry.leases < len(early) and not any(one.done() for one in early):
        await asyncio.sleep(0)
    os.kill(started.processes[0], signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        while entry.service.engine.status.state == "ready":
            await asyncio.sleep(0)
    assert (await ask(client, "new"))[1] in ("loading", "engine_down")
    await until(lambda: entry.service.running == len(early) or any(one.done() for one in early))
    await until(lambda: len(started.processes) > 1)
    os.kill(started.processes[1], signal.SIGCONT)
    assert await asyncio.wait_for(asyncio.gather(*early), SECONDS) == [right] * len(early)
