"""A real engine process killed and frozen under streams of every API: each says what it says when nobody does harm."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
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
from foresay.spec.request import Delta, Grammar, Request
from foresay.spec.sampling import SamplingParams
from tests.server.live import LiveServer, send_signal, status_of
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
        while (await load(client))["running"] < least:
            await asyncio.sleep(0.005)


async def load(client: aiohttp.ClientSession) -> dict[str, int]:
    async with client.get("/load") as response:
        found: dict[str, int] = await response.json()
        return found


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


async def test_an_answer_shows_that_it_was_resumed(
    server: LiveServer, folder: Path, client: aiohttp.ClientSession
) -> None:
    body = LONG | {"prompt": STORY, "max_tokens": 900}
    with existing(folder / "slow"):
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await harm_alone(server, client)
    answer = await (await asking).json()
    assert answer["metrics"]["resumed"] == 1 and "warnings" not in answer
    assert answer["metrics"]["tokens_per_step"] >= 1
    steps = answer["metrics"]["speculative_decoding"]
    assert sum(steps["acceptance_histogram"]) == steps["num_spec_steps"]
    assert answer["usage"]["completion_tokens"] == 900


async def harm_alone(server: LiveServer, client: aiohttp.ClientSession) -> None:
    await until_running(client, 1)
    [engine] = server.engine_processes()
    os.kill(engine, signal.SIGKILL)


async def test_a_request_whose_client_left_is_not_resumed(
    server: LiveServer, folder: Path, client: aiohttp.ClientSession
) -> None:
    before = await counted(client, "request_resumes_total")
    body = LONG | {"prompt": STORY, "max_tokens": 900, "stream": True}
    with existing(folder / "slow"), existing(folder / "held"):
        response = await client.post("/v1/completions", json=body)
        await response.content.readline()
        await harm_alone(server, client)
        response.close()
        async with asyncio.timeout(SECONDS):
            while (await load(client))["server_load"]:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(SECONDS):
        while await status_of(server.wait_for_url(), "/ready") != 200:
            await asyncio.sleep(0.05)
    assert await counted(client, "request_resumes_total") == before
    assert (await load(client))["server_load"] == 0


# -- below HTTP ------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=200, temperature=1.0, seed=7, ignore_eos=True)


async def written(engine: EngineClient, request: Request, kills: tuple[int, ...] = ()) -> tuple[list[int], Delta]:
    """Its tokens and its last delta; engines are killed once so many tokens are there, each once."""
    tokens: list[int] = []
    left, killed = list(kills), 0
    async for delta in generate(engine, request):
        tokens += delta.tokens
        now = engine.status
        if left and len(tokens) >= left[0] and now.state == "ready" and now.starts != killed:
            left.pop(0)
            killed = now.starts
            send_signal(engine, signal.SIGKILL)
    return tokens, delta


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[EngineClient]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_engines(PACED, folder, monkeypatch)
        engine = EngineClient(ServeConfig(max_seqs=4, max_model_len=1024))
        await engine.start()
        try:
            await asyncio.wait_for(engine.until_ready(), SECONDS)
            yield engine
        finally:
            await engine.stop()


async def test_killed_again_and_again_and_in_a_prompt(engine: EngineClient, folder: Path) -> None:
    prompt = [5 + number % 900 for number in range(700)]
    right, _ = await written(engine, Request(id="right", prompt=prompt, params=PARAMS))
    with existing(folder / "slow"):
        killed, last = await written(engine, Request(id="killed", prompt=prompt, params=PARAMS), kills=(10, 60))
    assert killed == right
    assert last.ending is not None and len(last.ending.resumed) == 2
    right, _ = await written(engine, Request(id="again", prompt=prompt[::-1], params=PARAMS))
    resumed: list[int] = []
    async with asyncio.timeout(SECONDS):
        while resumed != [0]:  # a busy machine may kill it later
            salt = str(time.monotonic_ns())
            request = Request(id=salt, prompt=prompt[::-1], params=PARAMS, salt=salt)
            reading = asyncio.create_task(written(engine, request))
            await asyncio.sleep(0.005)
            send_signal(engine, signal.SIGKILL)
            read, last = await reading
            assert read == right and last.ending is not None
            resumed = last.ending.resumed


async def test_a_request_hit_each_time_before_it_has_begun_is_no_suspect(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(text='start: /[a-f]{3,5}/ (" " /[a-f]{3,5}/){60}')
    request = Request(id="right", prompt=[5, 6, 7], params=PARAMS, grammar=grammar)
    right, _ = await written(engine, request)
    left = [signal.SIGKILL] * 3

    def harm(status: EngineStatus) -> None:
        if status.state == "ready" and left:
            send_signal(engine, left.pop())

    monkeypatch.setattr(engine, "observe_status", [harm])
    request.id = "killed"
    send_signal(engine, signal.SIGSTOP)  # it is not to begin
    asking = asyncio.create_task(written(engine, request))
    await asyncio.sleep(0)
    harm(engine.status)
    tokens, last = await asking
    assert tokens == right and not left
    assert last.ending is not None and last.ending.resumed == [0, 0, 0]


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


async def test_an_engine_that_computes_for_ever_is_noticed_by_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = ServeConfig(draft="none", max_seqs=1, max_model_len=256, engine_timeout=2.0), list[EngineStatus]()
    dying_engines("while True: pass", tmp_path, monkeypatch)
    engine = EngineClient(config)
    await engine.start()
    try:
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        engine.observe_status = [seen.append]
        with pytest.raises(KillsEngine, match="busy, but no kernel ended for 2 s"):
            await written(engine, Request(id="killer", prompt=[5, 999], params=PARAMS))
        assert [status.cause for status in seen if status.cause] == ["hung"]
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
        right = [(await written(engine, request))[0] for request in asked]
        others = [asyncio.create_task(written(engine, request)) for request in asked]
        await asyncio.sleep(0)
        flights = engine._in_flight._all.values()  # until all are proven more than one may be what kills it
        await until(lambda: all(flight.state == "proven" for flight in flights))
        with pytest.raises(KillsEngine, match=rf"{cause}\).*twice"):
            await written(engine, Request(id="killer", prompt=[5, 999], params=PARAMS))
        assert [tokens for tokens, _ in await asyncio.gather(*others)] == right
        assert engine.status.starts == 3
    finally:
        await engine.stop()
