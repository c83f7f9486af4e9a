"""How much may be used, through every route: rates, time, the queue, and bodies that are long in coming."""

from __future__ import annotations

import asyncio
import gc
import json
import math

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresay.server.engine.generation import Generation
from foresay.server.gateway.keys import MINUTE, KeyStore, RateLimiter
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.models import MODELS
from foresay.server.schemas.errors import RateLimited
from foresay.server.text.tokenizer import Tokenizer
from tests.gateway.guarded import ALICE, ASK, BOB, Clock, bearer, guarded
from tests.routes.apis import APIS
from tests.server.scripted import END, ScriptedEngine
from tests.server.wire import until


def auth(per_minute: int) -> AuthMiddleware:
    return AuthMiddleware(KeyStore([ALICE, BOB], per_minute=per_minute))


@pytest.fixture
def letters(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("abc")


async def post(client, path="/v1/completions", body=ASK, key=ALICE, **fields):
    return await client.post(path, json=body | fields, headers=bearer(key))


# -- rates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))
async def test_every_door_counts_requests_and_refuses_with_a_time(tokenizer, letters, api):
    engine = ScriptedEngine([*letters, END])
    async with guarded(engine, tokenizer, auth(2)) as client:
        for _ in range(2):
            assert (await post(client, api.path, api.request())).status == 200
        refused = await post(client, api.path, api.request())
        assert refused.status == 429
        assert 30 <= int(refused.headers["Retry-After"]) <= 60
        assert "2 requests per minute" in await refused.text()
        other = await post(client, api.path, api.request(), BOB)
        assert other.status == 200, "another key has its own"
    assert len(engine.requests) == 3


@pytest.mark.parametrize("wrong", [{"temperature": 9}, {"prompt": 7}, {"model": "other"}])
async def test_wrong_requests_are_counted_too_and_another_keys_are_not(tokenizer, letters, wrong):
    engine = ScriptedEngine([*letters, END])
    async with guarded(engine, tokenizer, auth(2)) as client:
        for _ in range(2):
            assert (await post(client, **wrong)).status in (400, 404)
        assert [(await post(client, **fields)).status for fields in (wrong, {})] == [429, 429]
        assert (await client.get("/v1/models", headers=bearer(ALICE))).status == 200, "what has no body is free"
        assert (await post(client, "/v1/completions", ASK, BOB)).status == 200
    assert len(engine.requests) == 1


async def test_what_asks_for_a_response_on_a_socket_is_counted_and_what_cancels_one_is_not(tokenizer, letters):
    async with (
        guarded(ScriptedEngine([*letters, END]), tokenizer, auth(2)) as client,
        client.ws_connect("/v1/responses", headers=bearer(ALICE)) as socket,
    ):
        create, statuses = '{"type": "response.create"}', []
        for message in (create, create, create, "[", '{"type": "response.cancel"}', create):
            await socket.send_str(message)
            if "cancel" not in message:
                statuses.append((await socket.receive_json(timeout=60))["status"])
        assert statuses == [400, 400, 429, 400, 429]


async def test_a_refusal_is_the_clients_own_rate_limit_error(tokenizer, letters):
    async with guarded(ScriptedEngine([*letters, END]), tokenizer, auth(1)) as client:
        url = str(client.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key=ALICE, max_retries=0) as official:
            await official.completions.create(model="toy", prompt="Tell")
            with pytest.raises(openai.RateLimitError) as caught:
                await official.completions.create(model="toy", prompt="Tell")
            assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
            await official.models.list()  # what computes nothing is not counted
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-wrong-0123456789", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.models.list()
            assert refused.value.code == "invalid_api_key"


async def test_a_wrong_key_costs_nobody_anything(tokenizer, letters):
    engine = ScriptedEngine(letters)
    async with guarded(engine, tokenizer, auth(2)) as client:
        for _ in range(3):
            assert (await post(client, key="sk-wrong-0123456789")).status == 401
        assert [(await post(client)).status for _ in range(3)] == [200, 200, 429]


async def test_without_keys_the_limits_are_everybodys_together(tokenizer, letters):
    alone = AuthMiddleware(KeyStore(per_minute=1))
    async with guarded(ScriptedEngine(letters), tokenizer, alone) as client:
        assert (await client.post("/v1/completions", json=ASK)).status == 200
        assert (await client.post("/v1/completions", json=ASK)).status == 429


# -- time and the queue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["reads to the end", "leaves"])
async def test_its_place_is_free_again_when_the_answer_ends_or_its_reader_leaves(tokenizer, letters, stream, how):
    engine = ScriptedEngine(letters, pause=0.02)
    async with guarded(engine, tokenizer, AuthMiddleware(), most_running=1) as client:
        asking = asyncio.create_task(post(client, max_tokens=200 if how == "leaves" else 50, stream=stream))
        await until(lambda: engine.emitted >= 2)
        refused = await post(client)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "1 requests are running or waiting already" in (await refused.json())["error"]["message"]
        if how == "leaves":
            if stream:
                (await asking).close()
            else:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        else:
            await (await asking).read()

        async with asyncio.timeout(60):
            while (await post(client, max_tokens=1)).status != 200:
                await asyncio.sleep(0.01)


async def test_every_choice_takes_a_place(tokenizer, letters):
    engine = ScriptedEngine(letters, hold_after=0)
    async with guarded(engine, tokenizer, AuthMiddleware(), most_running=3) as client:
        asking = asyncio.create_task(post(client, prompt=["a", "b"]))
        await until(lambda: len(engine.requests) == 2)
        assert (await post(client, prompt=["a", "b"])).status == 429
        never = await post(client, prompt=["a"] * 4)
        assert never.status == 429 and "Retry-After" not in never.headers
        assert "asks for 4 choices at once; this server runs 3" in await never.text()
        one = asyncio.create_task(post(client))
        await until(lambda: len(engine.requests) == 3)
        for task in (asking, one):
            task.cancel()
        await asyncio.gather(asking, one, return_exceptions=True)
        await until(lambda: client.app[MODELS].first.service.running == 0)


async def test_a_request_that_breaks_frees_its_place(tokenizer, letters):
    engine = ScriptedEngine(letters, fail_after=2)
    async with guarded(engine, tokenizer, AuthMiddleware(), most_running=1) as client:
        for _ in range(3):
            assert (await post(client)).status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_the_engine(tokenizer, letters, stream):
    engine = ScriptedEngine(letters, hold_after=9)
    async with guarded(engine, tokenizer, AuthMiddleware(), most_running=1, request_timeout=0.4) as client:
        response = await post(client, max_tokens=200, stream=stream)
        text = await response.text()
        assert "request_timeout" in text and "took longer than 0.4 s" in text
        assert len(engine.cancelled) == 1
        if not stream:
            assert response.status == 504
            assert response.headers["X-Should-Retry"] == "false"
        async with asyncio.timeout(60):
            while (await post(client, max_tokens=1)).status != 200:  # 429 as long as the slot is not free
                await asyncio.sleep(0.01)


async def test_no_time_limit_outlives_its_request(tokenizer, letters):
    def generations() -> list[Generation]:
        gc.collect()
        return [kept for kept in gc.get_objects() if type(kept) is Generation]

    async with guarded(ScriptedEngine(letters), tokenizer, AuthMiddleware(), request_timeout=3600.0) as client:
        before = generations()  # other tests of this process may have left some
        for _ in range(3):
            assert (await client.post("/v1/completions", json=ASK)).status == 200
        assert [kept for kept in generations() if not any(kept is old for old in before)] == []


async def test_the_official_client_does_not_repeat_what_would_take_too_long_again(tokenizer, letters):
    engine = ScriptedEngine(letters, hold_after=9)
    async with guarded(engine, tokenizer, AuthMiddleware(), request_timeout=0.05) as client:
        official = openai.AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key="none", max_retries=3)
        with pytest.raises(openai.InternalServerError) as caught:
            await official.completions.create(model="toy", prompt="Tell", max_tokens=200)
        await official.close()
    assert caught.value.code == "request_timeout"
    assert len(engine.requests) == 1


# -- the limiter alone -------------------------------------------------------------------------------------------------


def wait(limiter: RateLimiter) -> int:
    """Seconds that a request is told to wait; 0: it was let in."""
    try:
        limiter.enter()
    except RateLimited as refused:
        return refused.retry_after or 0
    return 0


def test_a_minute_lets_in_so_many_and_a_refused_one_is_not_counted():
    clock = Clock()
    limiter = RateLimiter(2, clock)
    assert (wait(limiter), wait(limiter), wait(limiter)) == (0, 0, 60)
    clock.now += 20
    with pytest.raises(RateLimited, match="At most 2 requests per minute are allowed; try again in 40 s") as refused:
        limiter.enter()
    assert refused.value.headers == {"Retry-After": "40"}
    clock.now += 40
    assert (wait(limiter), wait(limiter), wait(limiter)) == (0, 0, 60)


def test_without_a_limit_all_are_let_in():
    limiter = RateLimiter(None, Clock())
    assert not any(wait(limiter) for _ in range(1000))


@given(per_minute=st.integers(1, 30), pauses=st.lists(st.floats(0, 40, allow_nan=False), max_size=80))
def test_no_minute_lets_in_more_and_after_the_stated_wait_one_is_let_in(per_minute, pauses):
    clock = Clock()
    limiter, admitted = RateLimiter(per_minute, clock), list[float]()
    for pause in pauses:
        clock.now += pause
        if seconds := wait(limiter):
            assert seconds == math.ceil(admitted[-per_minute] + MINUTE - clock.now), "not a second too long"
            clock.now += seconds
            assert wait(limiter) == 0
        admitted.append(clock.now)
        if len(admitted) > per_minute:
            assert admitted[-1] - admitted[-1 - per_minute] >= MINUTE - 1e-6, "but for what fp64 rounds"


# -- bodies that are long in coming: they have a deadline, and hold up nobody else -------------------------------------


async def announced(
    client, length: str, body: bytes = b"", path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request of whose body so much comes."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
    return reader, writer


@pytest.mark.parametrize(
    ("length", "body"), [("Content-Length: 4000000", b"{"), ("Transfer-Encoding: chunked", b"1\r\n{\r\n")]
)
async def test_bodies_that_are_announced_and_do_not_come_are_in_nobodys_way(tokenizer, length, body):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware(), max_body_bytes=4_000_000) as client:
        opened = [await announced(client, length, body) for _ in range(70)]
        response = await client.post("/v1/completions", json=ASK)
        for _, writer in opened:
            writer.close()
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/completions", {"type": "timeout_error", "code": "body_timeout"}),
        ("/v1/messages", {"type": "timeout_error"}),
        ("/api/generate", "10 bytes of the body came in 0.1 s"),
    ],
)
async def test_a_body_has_a_deadline(tokenizer, path, said):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.1
        reader, writer = await announced(client, "Content-Length: 100", b" " * 10, path)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert b" 408 " in head.partition(b"\r\n")[0] and b"Connection: close" in head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert "10 bytes of the body came in" in (error if isinstance(error, str) else error["message"])
        if isinstance(said, dict):
            assert error.items() >= said.items()
        writer.close()


async def test_a_body_that_trickles_has_the_same_deadline(tokenizer):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.2
        reader, writer = await announced(client, "Content-Length: 100000")
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert b" 408 " in await answer
        writer.close()
