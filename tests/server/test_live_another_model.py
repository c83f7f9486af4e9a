"""``POST /admin/reload`` to another model under streams of a real engine: which model has a request, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from foresay.server.settings.resolved import BUNDLED
from tests.server.live import LiveServer
from tests.server.patched import PACED, existing, patched_path

pytestmark = pytest.mark.slow
SECONDS = 300.0
HEADERS = {"Authorization": "Bearer an-admin-key-of-a-test"}
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 600,
    "temperature": 0,
    "seed": 7,
    "ignore_eos": True,
}
DRAWN = LONG | {"n": 2, "temperature": 1.0, "max_tokens": 400}
SHORT = LONG | {"max_tokens": 24}
ENDING = "running requests end before another model comes"


class Setup(NamedTuple):
    """A server, its client, the directories of two models: the one that it serves, and another; texts by prompts."""

    server: LiveServer
    client: aiohttp.ClientSession
    models: list[Path]
    texts: dict[str, list[tuple[list[str], Any]]]

    @property
    def folder(self) -> Path:
        """Where a file makes engines slow."""
        return self.models[0].parent

    async def ask(self, body: dict[str, Any]) -> Any:
        """An answer."""
        async with self.client.post("/v1/completions", json=body) as response:
            return await response.json()

    async def config(self) -> Any:
        """The settings that it has now."""
        async with self.client.get("/server_info") as response:
            return (await response.json())["config"]

    async def replaced(self) -> None:
        """The other model serves."""
        body = {"settings": {"target": str(self.models[1])}}
        async with self.client.post("/admin/reload", json=body, headers=HEADERS) as response:
            last = await response.json()
        assert last["status"] == "replaced", last
        self.models.reverse()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LiveServer, list[Path], dict[str, list[tuple[list[str], Any]]]]]:
    folder = tmp_path_factory.mktemp("another_model")
    models = [shutil.copytree(BUNDLED / "target", folder / name) for name in ("one", "two")]
    config = json.loads((models[1] / "config.json").read_text())
    (models[1] / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    flags = ("--max-model-len", "1024", "--max-seqs", "4", "--engine-timeout", "1800", "--draft", "none")
    with LiveServer(
        folder / "log",
        str(models[0]),
        "--admin-key",
        HEADERS["Authorization"].split()[1],
        *flags,
        variables={"PYTHONPATH": patched_path(PACED, folder)},
    ) as server:
        server.wait_for_url()
        yield server, models, {}


@pytest.fixture
async def setup(served: tuple[LiveServer, list[Path], dict[str, list[tuple[list[str], Any]]]]) -> AsyncIterator[Setup]:
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(served[0].wait_for_url(), timeout=timeout) as client:
        setup = Setup(served[0], client, served[1], served[2])
        yield setup


async def read(response: aiohttp.ClientResponse, begun: asyncio.Event) -> tuple[list[str], Any]:
    """The texts of a stream by choice, and its usage. begun: set once there is some text."""
    texts = ["", ""]
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            usage = event.get("usage")
            begun.set()
    return texts, usage


@asynccontextmanager
async def streams(
    setup: Setup, *bodies: dict[str, Any], stopped: int | None = None
) -> AsyncIterator[list[asyncio.Task[tuple[list[str], Any]]]]:
    """Streams that have begun. stopped: the process of their engine, stopped then, before any of them has ended."""
    async with contextlib.AsyncExitStack() as open_ones:
        reading, begun = [], []
        with contextlib.nullcontext() if stopped is None else existing(setup.folder / "slow"):
            for body in bodies:
                requested = setup.client.post(
                    "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
                )
                begun.append(asyncio.Event())
                reading.append(asyncio.create_task(read(await open_ones.enter_async_context(requested), begun[-1])))
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(event.wait() for event in begun))
            if stopped is not None:
                os.kill(stopped, signal.SIGSTOP)
        yield reading


async def undisturbed(setup: Setup, *bodies: dict[str, Any]) -> list[tuple[list[str], Any]]:
    """The texts of their streams; requested once of each model."""
    key = f"{setup.models[0]} {bodies}"
    if key not in setup.texts:
        async with streams(setup, *bodies) as reading:
            setup.texts[key] = await asyncio.gather(*reading)
    return setup.texts[key]


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.soak), True])
async def test_what_runs_ends_undisturbed_and_new_requests_wait_for_the_other_model(killed: bool, setup: Setup) -> None:
    [(texts, _)] = await undisturbed(setup, LONG)
    bodies = [LONG, DRAWN, LONG | {"stop": texts[0][len(texts[0]) // 2 :][:40]}]
    right, short = await undisturbed(setup, *bodies), await setup.ask(SHORT)
    [before] = setup.server.engine_processes()
    async with streams(setup, *bodies, stopped=before) as reading, asyncio.TaskGroup() as tasks:
        seen = setup.server.output.count(ENDING)
        replacing = tasks.create_task(setup.replaced())
        while setup.server.output.count(ENDING) == seen:
            await asyncio.sleep(0.05)
        waiting = asyncio.create_task(setup.ask(SHORT))
        await asyncio.sleep(0.5)
        assert not waiting.done() and not any(one.done() for one in reading)
        os.kill(before, signal.SIGKILL if killed else signal.SIGCONT)
        assert await asyncio.gather(*reading) == right
        await replacing
        other = await waiting
    assert other["choices"] != short["choices"] and other["system_fingerprint"] != short["system_fingerprint"]
    assert len(setup.server.engine_processes()) == 1
    async with setup.client.get("/dashboard/state") as response:
        assert (await response.json())["snapshot"]["server"]["target"] == str(setup.models[0])
