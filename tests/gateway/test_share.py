"""What all keys share: none can take all of it, the next one gets some, and one alone may use everything."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from foresay.server.api.about import dashboard
from foresay.server.api.common import route
from foresay.server.api.responses.store import SocketLimits
from foresay.server.gateway.caller import Caller, RateLimiter, Shared, serve
from foresay.server.gateway.keys import KeyStore
from foresay.server.host.models.models import MODELS
from foresay.server.http.auth import AuthMiddleware
from foresay.server.http.life import SharedThreads
from foresay.server.schemas.errors import Busy
from tests.gateway.guarded import ALICE, ASK, BOB, bearer, guarded
from tests.responses.serving import saying, serving
from tests.server.scripted import END, ScriptedEngine
from tests.server.wire import until

KEYS = pytest.mark.parametrize(("keys", "most"), [([ALICE, BOB], 4), ([ALICE], 8)], ids=["two keys", "one key"])
PATH = "/v1/responses"


def took(shared: Shared, caller: Caller, amount: int = 1) -> bool:
    serve(caller=caller)
    try:
        shared.take(amount, lambda: Busy("no"))
    except Busy:
        return False
    return True


def keyed(name: str) -> Caller:
    caller = Caller(name, name, RateLimiter())
    caller.rate_limiter.alone = False
    return caller


def test_no_key_holds_more_than_stays_free():
    shared, alice, bob = Shared(12), keyed("alice"), keyed("bob")
    assert sum(took(shared, alice) for _ in range(20)) == 6
    assert sum(took(shared, bob) for _ in range(20)) == 3
    serve(caller=alice)
    shared.give(2)
    assert not took(shared, alice)
    assert sum(took(shared, bob) for _ in range(20)) == 1, "now both have a third"
    assert (shared.used, shared.own) == (8, 4)


def test_who_holds_nothing_gets_what_is_free_however_little():
    shared = Shared(4)
    got = [sum(took(shared, keyed(name)) for _ in range(9)) for name in "abcd"]
    assert got == [2, 1, 1, 0]
    assert took(Shared(1), keyed("a")) and not took(Shared(1), keyed("a"), 2)


def test_it_adds_up_whatever_happens():
    rng, shared, callers = random.Random(3), Shared(1000), [keyed(name) for name in "abc"]
    held: Counter[str] = Counter()
    for _ in range(5000):
        caller, amount = rng.choice(callers), rng.randrange(1, 200)
        if held[caller.tenant] >= amount and rng.random() < 0.5:
            serve(caller=caller)
            shared.give(amount)
            held[caller.tenant] -= amount
        else:
            first, free = not held[caller.tenant], 1000 - held.total() - amount
            fits = free >= 0 and (first or held[caller.tenant] + amount <= free)
            assert took(shared, caller, amount) == fits
            held[caller.tenant] += amount * fits
        assert shared.used == held.total() <= 1000


@contextmanager
def pool(most: int) -> Iterator[Callable[[Caller, Callable[[], Any]], asyncio.Future[Any]]]:
    """Runs work for a caller in one of ``most`` shared threads."""
    with SharedThreads(most) as threads:

        def run(caller: Caller, work: Callable[[], Any]) -> asyncio.Future[Any]:
            serve(caller=caller)
            return asyncio.get_running_loop().run_in_executor(threads, work)

        yield run


async def test_one_key_cannot_have_all_threads():
    alice, bob, carol, over = keyed("alice"), keyed("bob"), keyed("carol"), threading.Event()
    with pool(4) as run:
        held = [run(alice, over.wait) for _ in range(9)]
        assert await asyncio.wait_for(run(bob, lambda: "bob"), 60) == "bob"
        held += [run(bob, over.wait), run(bob, over.wait)]
        assert await asyncio.wait_for(run(carol, lambda: "carol"), 60) == "carol"
        held[8].cancel()
        over.set()
        assert await asyncio.gather(*held[:8], *held[9:]) == [True] * 10
        with pytest.raises(ZeroDivisionError):
            await run(alice, lambda: 1 / 0)


async def test_who_is_alone_has_all_threads_and_others_take_turns():
    anyone, running = Caller(), threading.Barrier(5)
    with pool(4) as run:
        jobs = [run(anyone, running.wait) for _ in range(4)]
        await asyncio.to_thread(running.wait, 60)
        await asyncio.gather(*jobs)
    done: list[str] = []
    with pool(1) as run:
        begin = threading.Event()
        jobs = [run(keyed("first"), begin.wait)]
        for name in ("alice", "alice", "alice", "bob", "carol"):
            jobs.append(run(keyed(name), partial(done.append, name)))
        begin.set()
        await asyncio.gather(*jobs)
    assert done == ["alice", "bob", "carol", "alice", "alice"]


async def test_a_pool_that_is_shut_down_keeps_nobody_waiting():
    over, threads = threading.Event(), SharedThreads(1)
    loop = asyncio.get_running_loop()
    running, waiting = (loop.run_in_executor(threads, over.wait) for _ in range(2))
    threads.shutdown(wait=False)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 60)
    over.set()
    assert await running
    with pytest.raises(RuntimeError):
        threads.submit(over.wait)


@KEYS
async def test_one_key_cannot_fill_the_queue(tokenizer, keys, most):
    engine = ScriptedEngine(tokenizer.encode("abc"), hold_after=0)
    async with guarded(engine, tokenizer, AuthMiddleware(KeyStore(keys)), most_running=8) as client:
        waiting = [
            asyncio.create_task(client.post("/v1/completions", json=ASK, headers=bearer(ALICE))) for _ in range(most)
        ]
        await until(lambda: len(engine.requests) == most)
        refused = await client.post("/v1/completions", json=ASK, headers=bearer(ALICE))
        error = (await refused.json())["error"]
        assert (refused.status, error["code"]) == (429, "queue_full")
        assert f"{most} requests are running or waiting already, {most} of them yours" in error["message"]
        if len(keys) > 1:
            waiting.append(asyncio.create_task(client.post("/v1/completions", json=ASK, headers=bearer(BOB))))
            await until(lambda: len(engine.requests) == most + 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: client.app[MODELS].first.service.running == 0)


@KEYS
async def test_one_key_cannot_have_all_pages_of_the_dashboard(tokenizer, monkeypatch, keys, most):
    monkeypatch.setattr(dashboard, "MOST_READERS", 8)
    async with (
        guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware(KeyStore(keys))) as client,
        AsyncExitStack() as pages,
    ):
        for _ in range(most):
            page = await pages.enter_async_context(client.get("/dashboard/feed", headers=bearer(ALICE)))
            assert page.status == 200
        for key in keys:
            page = await pages.enter_async_context(client.get("/dashboard/feed", headers=bearer(key)))
            assert page.status == (429 if key == ALICE else 200)


@KEYS
async def test_one_key_cannot_have_all_sockets(tokenizer, keys, most):
    limits, auth = SocketLimits(most=8), AuthMiddleware(KeyStore(keys))
    async with serving(saying(tokenizer), tokenizer, limits, auth=auth) as (http, service), AsyncExitStack() as opened:
        for _ in range(most):
            await opened.enter_async_context(http.ws_connect(PATH, headers=bearer(ALICE)))
        await until(lambda: len(service.server.on_drain) == most)
        full = await opened.enter_async_context(http.ws_connect(PATH, headers=bearer(ALICE)))
        assert (await full.receive_json(timeout=60))["error"]["code"] == "websocket_connection_limit_reached"
        if len(keys) > 1:
            other = await opened.enter_async_context(http.ws_connect(PATH, headers=bearer(BOB)))
            await other.send_json({"type": "response.create", "input": "Tell"})
            assert (await other.receive_json(timeout=60))["type"] == "response.created"


async def announced(
    client, length: str, body: bytes = b"", key: str = ALICE, path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request of whose body so much comes."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{length}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def test_the_bodies_of_one_key_are_bounded_as_they_come(tokenizer):
    auth = AuthMiddleware(KeyStore([ALICE, BOB]), largest_body=20_000)
    async with guarded(ScriptedEngine([END]), tokenizer, auth, max_body_bytes=1250) as client:
        bodies, writers = client.app[MODELS].server.bodies, []
        for key, length, body, held in (
            (ALICE, "Content-Length: 16000", b" " * 15_000, 15_000),
            (ALICE, "Transfer-Encoding: chunked", b"4e20\r\n" + b" " * 15_000, 30_000),
            (BOB, "Content-Length: 20000", b" " * 19_000, 49_000),
        ):
            writers.append((await announced(client, length, body, key))[1])
            await until(lambda held=held: bodies.used == held)
        reader, writer = await announced(client, "Content-Length: 16000", b" " * 16_000)
        writers.append(writer)
        assert b"429" in await asyncio.wait_for(reader.readline(), 60)
        assert b"bytes of request bodies are held already" in await reader.read(4096)
        await until(lambda: bodies.used == 49_000)
        assert (await client.get("/v1/models", headers=bearer(ALICE))).status == 200, "what has no body is let in"
        for writer in writers:
            writer.close()
        await until(lambda: bodies.used == 0)


@pytest.mark.parametrize(
    ("length", "body"), [("Content-Length: 4000000", b"{"), ("Transfer-Encoding: chunked", b"1\r\n{\r\n")]
)
async def test_bodies_that_are_announced_and_do_not_come_are_in_nobodys_way(tokenizer, length, body):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware(), max_body_bytes=4_000_000) as client:
        bodies = client.app[MODELS].server.bodies
        opened = [await announced(client, length, body) for _ in range(70)]
        await until(lambda: bodies.used in (70, bodies.most))
        response = await client.post("/v1/completions", json=ASK)
        for _, writer in opened:
            writer.close()
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/completions", {"type": "timeout_error", "code": "body_timeout"}),
        ("/v1/messages", {"type": "timeout_error"}),
        ("/api/generate", "10 bytes of the body came in"),
    ],
)
async def test_a_body_has_a_deadline(tokenizer, path, said):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.1
        reader, writer = await announced(client, "Content-Length: 100", b" " * 10, path=path)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert b" 408 " in head.partition(b"\r\n")[0] and b"Connection: close" in head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert "10 bytes of the body came in" in (error if isinstance(error, str) else error["message"])
        if isinstance(said, dict):
            assert error.items() >= said.items()
        assert client.app[MODELS].server.bodies.used == 0
        writer.close()


async def test_a_body_that_keeps_coming_may_take_its_time(tokenizer, monkeypatch):
    monkeypatch.setattr(route, "BODY_PACE", 1)
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.1
        body = json.dumps(ASK).encode().ljust(200)
        reader, writer = await announced(client, "Content-Length: 200", body[:150])
        await asyncio.sleep(0.3)
        writer.write(body[150:])
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()


async def test_the_messages_that_wait_on_all_sockets_of_a_key_are_bounded_together(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    auth = AuthMiddleware(KeyStore([ALICE, BOB]), largest_body=20_000)
    message = {"type": "response.create", "input": "Tell", "unknown": "x" * 10_000, "stream_id": "a"}
    async with serving(engine, tokenizer, auth=auth, max_body_bytes=1000) as (http, service):
        async with AsyncExitStack() as opened:
            one, two, other = [
                await opened.enter_async_context(http.ws_connect(PATH, headers=bearer(key)))
                for key in (ALICE, ALICE, BOB)
            ]
            for socket, held in ((one, 10_000), (two, 20_000), (one, 30_000), (two, 30_000)):
                await socket.send_json(message)
                await until(lambda held=held: service.server.bodies.used > held)
            event = await two.receive_json(timeout=60)
            while event["type"] != "error":
                event = await two.receive_json(timeout=60)
            assert (event["status"], event["error"]["code"], event["stream_id"]) == (429, "too_many_waiting", "a")
            assert "of them yours" in event["error"]["message"]
            await other.send_json(message)
            assert (await other.receive_json(timeout=60))["type"] == "response.created"
            await one.send_json({"type": "response.cancel"})
            await until(lambda: service.server.bodies.used < 25_000)
        await until(lambda: service.server.bodies.used == 0 and not service.running)
