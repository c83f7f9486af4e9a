"""What every API that writes a text does alike, over a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError, web

from foresay.server.api.common.route import EventStream
from foresay.server.engine.generation import EngineStatus, Sink
from foresay.server.models.service import Service
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Request
from tests.routes.apis import APIS, Answer, Api, error_in
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import STORY, until

apis = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))
streams = pytest.mark.parametrize("stream", [False, True])


@apis
@pytest.mark.parametrize("run", [1, 3, 50])
async def test_a_stream_says_what_the_whole_answer_says(tokenizer, script, api: Api, run):
    async with served(ScriptedEngine(script, run), tokenizer) as client:
        assert await api.answer(client) == await api.answer(client, True) == Answer(STORY, "stop", len(script))
        whole = await api.answer(client, stop=["said"])
        assert whole == await api.answer(client, True, stop=["said"])
        assert (whole.text, whole.finish) == (STORY.partition("said")[0], "stop")
        response = await client.post(api.path, json=api.request(True))
        body = await response.read()
    lines = api.path.startswith("/api/")
    assert response.content_type == ("application/x-ndjson" if lines else "text/event-stream")
    assert (response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert "Content-Encoding" not in response.headers
    assert len(body.decode().splitlines()) == body.count(b"\n"), "a line is one line for everybody"


@apis
@streams
async def test_an_answer_may_be_cut_or_empty(tokenizer, script, api: Api, stream):
    async with served(ScriptedEngine(script), tokenizer) as client:
        cut = await api.answer(client, stream, max_tokens=3)
    assert (cut.finish, cut.tokens) == ("length", 3) and STORY.startswith(cut.text)
    async with served(ScriptedEngine([END]), tokenizer) as client:
        assert await api.answer(client, stream) == Answer("", "stop", 1)


LONG = "fox " * 600
WRONG: list[tuple[str, Any]] = [
    *[
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("temperature", 9),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_k", -5),
    ],
    *[("stop", [""]), ("stop", [1]), ("prompt", LONG), ("messages", [{"role": "user", "content": LONG}])],
]


@streams
@pytest.mark.parametrize(
    ("api", "field", "wrong"),
    [
        pytest.param(api, field, wrong, id=f"{name}-{field}-{number}")
        for name, api in APIS.items()
        for number, (field, wrong) in enumerate(WRONG)
        if field not in ("prompt", "messages") or api.name(field) in api.body
    ],
)
async def test_what_is_out_of_range_is_refused_by_the_name_it_has_there(tokenizer, api: Api, stream, field, wrong):
    engine, name = ScriptedEngine([END]), api.name(field)
    async with served(engine, tokenizer) as client:
        response = await client.post(api.path, json=api.request(stream, **{field: wrong}))
        body = await response.json()
    message = error_in(body) or ""
    assert response.status == 400 and engine.requests == []
    assert name in message or "maximum context length" in message
    if api.path.startswith("/api/"):
        assert set(body) == {"error"}
    else:
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"].partition("[")[0] == name


@apis
@streams
async def test_what_the_engine_refuses_or_breaks(tokenizer, api: Api, stream):
    engine = ScriptedEngine(tokenizer.encode("abcdef"), fail_after=3)
    async with served(engine, tokenizer) as client:
        response = await client.post(api.path, json=api.request(stream))
        if stream:
            broken = api.read(await response.text())
            assert (broken.text, broken.error) == ("abc", "the script breaks here")
        else:
            assert (response.status, error_in(await response.json())) == (500, "the script breaks here")
        engine.refusal = InvalidRequest("prompt", "no such prompt")
        response = await client.post(api.path, json=api.request(stream))
        assert (response.status, error_in(await response.json())) == (400, "no such prompt")


@apis
@streams
async def test_a_refusal_says_why_it_cannot_be_served_now(tokenizer, api: Api, stream):
    engine, services = ScriptedEngine(tokenizer.encode("abc"), hold_after=0), list[Service]()
    async with served(engine, tokenizer, services.append, most_running=2) as client:

        async def refused(status: int, code: str, **fields: Any) -> str:
            response = await client.post(api.path, json=api.request(stream, **fields))
            assert (response.status, "Retry-After" in response.headers) == (status, status != 404)
            body = await response.json()
            assert api.path.startswith("/api/") or body["error"].get("code", code) == code
            return error_in(body) or ""

        assert "'wolf'" in await refused(404, "model_not_found", model="wolf")
        running = asyncio.gather(*[client.post(api.path, json=api.request()) for _ in range(2)], return_exceptions=True)
        await until(lambda: len(engine.requests) == 2)
        assert "requests" in await refused(429, "queue_full")
        running.cancel()
        services[0].server.draining = True
        assert "shutting down" in await refused(503, "draining")
        assert (await client.get("/ready")).status == 503
        services[0].server.draining = False
        engine.status = EngineStatus("down", "the engine process died (signal 9)")
        assert "signal 9" in await refused(503, "engine_down")
        engine.status, engine.info = EngineStatus("loading", "weights of the target", 0.4), None
        assert await refused(503, "loading") == "Loading model: weights of the target (40%)"
        assert (await (health := await client.get("/health")).json())["status"] == "loading" and health.status == 503


@apis
async def test_draining_lets_answers_finish_unless_it_takes_too_long(tokenizer, api: Api):
    engine, services = ScriptedEngine(tokenizer.encode("abc"), pause=0.02), list[Service]()
    async with served(engine, tokenizer, services.append) as client:
        running = asyncio.create_task(api.answer(client, max_tokens=6))
        await until(lambda: engine.requests)
        await services[0].drain(60)
        assert (await running).text == "abcabc"
    engine.hold_after = 3
    async with served(engine, tokenizer, services.append) as client:
        streamed = await client.post(api.path, json=api.request(True))
        whole = asyncio.create_task(client.post(api.path, json=api.request()))
        await until(lambda: len(engine.requests) == 3)
        await services[1].drain(0.1)
        ended = api.read(await streamed.text()).error, error_in(await (await whole).json()), (await whole).status
    assert ended == ("the server is shutting down", "the server is shutting down", 500)
    assert len(engine.cancelled) == 2


class Held(ScriptedEngine):
    """Says nothing before the gate opens."""

    gate: asyncio.Event

    async def _say(self, request: Request, sink: Sink) -> None:
        await self.gate.wait()
        await super()._say(request, sink)


@apis
async def test_a_quiet_stream_is_kept_open(tokenizer, api: Api):
    engine = Held(tokenizer.encode("ab"))
    engine.gate = asyncio.Event()
    async with served(engine, tokenizer, ping_seconds=0.05) as client, asyncio.timeout(60):
        response = await client.post(api.path, json=api.request(True, max_tokens=2))
        quiet = await response.content.readuntil(api.quiet * 3) if api.quiet else b""
        engine.gate.set()
        assert api.path != "/v1/chat/completions" or b'"role":"assistant"' in quiet, "it waits for no token"
        assert api.read((quiet + await response.read()).decode()).text == "ab"


@apis
@streams
async def test_a_reader_who_leaves_frees_the_engine(tokenizer, api: Api, stream):
    engine = ScriptedEngine(tokenizer.encode("abc"), hold_after=3)
    async with served(engine, tokenizer) as client:
        asking = asyncio.create_task(client.post(api.path, json=api.request(stream)))
        await until(lambda: engine.emitted >= 3)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: engine.cancelled)
    assert engine.cancelled == [engine.requests[0].id]


def await_gate_before_second_write(monkeypatch, gate: asyncio.Event) -> None:
    """A connection whose buffers are full after one event, until the gate opens."""
    plain_write, writes = web.StreamResponse.write, iter(range(1 << 20))

    async def write(self, data):
        if next(writes):
            await gate.wait()
        await plain_write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write)


@apis
@pytest.mark.parametrize(("pending", "emitted"), [(1000, 100), (20, 40)])
async def test_a_slow_reader_gets_all_in_fewer_events_or_loses_the_stream(
    tokenizer, monkeypatch, api: Api, pending, emitted
):
    engine, gate = ScriptedEngine(tokenizer.encode("abcdefghij"), pause=0.001), asyncio.Event()
    await_gate_before_second_write(monkeypatch, gate)
    async with served(engine, tokenizer, most_pending_tokens=pending) as client:
        response = await client.post(api.path, json=api.request(True, max_tokens=100))
        await until(lambda: engine.emitted == 100 or engine.cancelled)  # nobody reads, and the engine goes on
        assert engine.emitted <= emitted
        gate.set()
        text = await response.text()
    answer = api.read(text)
    if pending > 100:
        assert answer == Answer("abcdefghij" * 10, "length", 100)
        assert len(api.events(text)) < 30
    else:
        assert answer.error == "the client left more than 20 tokens unread"


@apis
async def test_a_client_that_is_gone_when_something_is_written_is_no_mistake(tokenizer, monkeypatch, caplog, api: Api):
    async def write(self: EventStream, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "write", write)
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.01)
    async with served(engine, tokenizer) as client:
        with pytest.raises(ServerDisconnectedError):
            await client.post(api.path, json=api.request(True))
        assert (await client.get("/health")).status == 200
    assert engine.cancelled == [engine.requests[0].id]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
