"""A real engine process killed and frozen under streams of every API: each says what it says when nobody does harm."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.soak.clients import LONGEST_LINE, Received, visit
from bench.soak.requests import SoakRequest
from foresay.server.engine.generation import EngineStatus, generate
from foresay.server.engine_process.client import EngineClient
from foresay.server.schemas.errors import KillsEngine
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.server.live import LiveServer
from tests.server.patched import PACED, existing, patch_engines, patched_path
from tests.server.wire import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SECONDS = 180.0
MODEL = "bundled"
STORY = "Once upon a time there was a fox who"
LONG: dict[str, Any] = {"model": MODEL, "ignore_eos": True}
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60, "maxItems": 60}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}]}
LARK = 'start: /[a-z]{2,9}/ (" " /[a-z]{2,9}/){90}'


def completion(stream: bool, **fields: Any) -> SoakRequest:
    return SoakRequest("completions", (LONG | {"prompt": STORY, "max_tokens": 160, "stream": stream} | fields,), stream)


def requests(stop: str, text: str) -> list[SoakRequest]:
    """What runs at once. stop: late in the greedy text, which is ``text``."""
    counted = {"stream_options": {"include_usage": True}}
    chat = {"model": MODEL, **CHAT, "max_tokens": 240}
    response = {"model": MODEL, "input": STORY, "max_output_tokens": 160, "ignore_eos": True}
    schema = {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}}
    ollama = {"model": MODEL, "prompt": STORY, "stream": True, "options": {"num_predict": 160, "seed": 4}}
    prediction = {"type": "content", "content": text}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    return [
        completion(True, temperature=0, stop=[stop], **counted),
        completion(False, temperature=0, stop=[stop], min_tokens=90, echo=True, logprobs=2),
        completion(True, temperature=1, seed=5, n=3, return_token_ids=True, **counted),
        completion(False, temperature=0.7, seed=6, logprobs=3, **penalties),
        completion(True, temperature=0, prediction=prediction, prompt_logprobs=1, **counted),
        SoakRequest("chat", (chat | {"response_format": schema, "seed": 3, "stream": True},), True),
        SoakRequest("chat", (chat | {"structured_outputs": {"grammar": LARK}, "seed": 8, "stream": False},), False),
        SoakRequest("socket", (response | {"temperature": 1, "seed": 2},), True),
        SoakRequest("messages", (chat | {"max_tokens": 160, "stream": True, "temperature": 0},), True),
        SoakRequest("ollama generate", (ollama,), True),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes engines slow, or holds them."""
    return tmp_path_factory.mktemp("paced")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    flags = ("--draft", "auto", "--seed", "1", "--max-seqs", "12", "--max-model-len", "1024", "--engine-timeout", "2")
    with LiveServer(folder / "log", *flags, variables={"PYTHONPATH": patched_path(PACED, folder)}) as server:
        server.wait_for_url()
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: LiveServer) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(server.wait_for_url(), timeout=timeout, read_bufsize=LONGEST_LINE) as client:
        yield client


async def all_of(client: aiohttp.ClientSession, asked: list[SoakRequest]) -> list[Received]:
    return [
        turn for talks in await asyncio.gather(*(visit(client, [request]) for request in asked)) for [turn] in talks
    ]


async def counted(client: aiohttp.ClientSession, name: str) -> float:
    async with client.get("/metrics") as response:
        return sum(map(float, re.findall(rf"^foresay:{name}\S* (\S+)$", await response.text(), re.MULTILINE)))


async def until_running(client: aiohttp.ClientSession, least: int) -> None:
    """Until so many run."""
    async with asyncio.timeout(SECONDS):
        while True:
            async with client.get("/load") as response:
                if (await response.json())["running"] >= least:
                    return
            await asyncio.sleep(0.005)


async def harm(server: LiveServer, client: aiohttp.ClientSession, signals: list[signal.Signals]) -> None:
    """Once they run, and again when those that are left go on."""
    least = 12
    for number in signals:
        await until_running(client, least)
        [engine] = server.engine_processes()
        os.kill(engine, number)
        least = 4
        await until(lambda engine=engine: len(left := server.engine_processes()) == 1 and left != [engine])


HARMS = {"killed twice": [signal.SIGKILL, signal.SIGKILL], "frozen": [signal.SIGSTOP]}


@pytest.fixture(scope="module")
def asked(server: LiveServer) -> list[SoakRequest]:
    async def greedy() -> str:
        async with aiohttp.ClientSession(server.wait_for_url()) as client:
            [received] = await all_of(client, [completion(False, temperature=0)])
        return str(received.reply.parts["choices"]["0"]["text"])

    text = asyncio.run(greedy())
    return requests(text[-60:-40], text)


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer, asked: list[SoakRequest]) -> list[Received]:
    async def received() -> list[Received]:
        async with aiohttp.ClientSession(server.wait_for_url(), read_bufsize=LONGEST_LINE) as client:
            return await all_of(client, asked)

    found = asyncio.run(received())
    assert [one for one in found if one.broken or one.reply.error or not one.reply.over] == []
    return found


@pytest.mark.parametrize("how", HARMS)
async def test_nothing_is_sent_twice_and_nothing_left_out(
    how: str,
    server: LiveServer,
    folder: Path,
    client: aiohttp.ClientSession,
    asked: list[SoakRequest],
    undisturbed: list[Received],
) -> None:
    before = await counted(client, "request_resumes_total")
    with existing(folder / "slow", "0.2"):  # the shortest is there yet when the last one runs
        running = asyncio.create_task(all_of(client, asked))
        await harm(server, client, HARMS[how])
    for received, right in zip(await running, undisturbed, strict=True):
        assert received.reply.error is None and received.reply.over and not received.broken, received
        assert not received.reply.unlike
        assert received.reply.parts == right.reply.parts, received.request.api
    assert await counted(client, "request_resumes_total") - before >= 8
    assert re.search(r"engine replaced after \d+\.\d s; \d+ streams go on", server.output)


# -- below HTTP ------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=200, temperature=1.0, seed=7, ignore_eos=True)


async def written(engine: EngineClient, request: Request) -> list[int]:
    """Its tokens."""
    return [token async for delta in generate(engine, request) for token in delta.tokens]


#: An engine process that ends in the step in which a prompt with this token is read.
KILLER = """
import os, sys

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.spec.engine import EngineCore

    step = EngineCore.step

    def ending(engine):
        if any(sequence.tokens[:2] == [5, 999] for sequence in engine.scheduler.running):
            DIES
        return step(engine)

    EngineCore.step = ending
"""


def dying_engines(dies: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engine processes die so. dies: a statement."""
    patch_engines(KILLER.replace("DIES", dies), folder, monkeypatch)


async def test_a_prompt_that_the_engine_dies_of_takes_nobody_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying_engines("os._exit(3)", tmp_path, monkeypatch)
    await dies_of_a_prompt(EngineClient(ServeConfig(max_seqs=8, max_model_len=1024)), "exit status 3")


async def test_an_engine_that_waits_for_ever_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = ServeConfig(draft="none", max_seqs=1, max_model_len=256, engine_timeout=2.0), list[EngineStatus]()
    dying_engines("__import__('time').sleep(1e6)", tmp_path, monkeypatch)
    engine = EngineClient(config)
    await engine.start()
    try:
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        engine.observe_status = [seen.append]
        with pytest.raises(KillsEngine, match="no sign of life for 2 s"):
            await written(engine, Request(id="killer", prompt=[5, 999], params=PARAMS))
        assert [status.cause for status in seen if status.cause] == ["hung", "hung"]
    finally:
        await engine.stop()


async def dies_of_a_prompt(engine: EngineClient, cause: str) -> None:
    await engine.start()
    try:
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        asked = [
            Request(id=str(n), prompt=[5, 6, n], params=SamplingParams(max_tokens=300, seed=n, ignore_eos=True))
            for n in range(7, 11)
        ]
        right = [await written(engine, request) for request in asked]
        others = [asyncio.create_task(written(engine, request)) for request in asked]
        await asyncio.sleep(0)
        flights = engine._in_flight._all.values()  # until all are proven more than one may be what kills it
        await until(lambda: all(flight.state == "proven" for flight in flights))
        with pytest.raises(KillsEngine, match=rf"{cause}\).*twice"):
            await written(engine, Request(id="killer", prompt=[5, 999], params=PARAMS))
        assert await asyncio.gather(*others) == right
        assert engine.status.starts == 3
    finally:
        await engine.stop()
