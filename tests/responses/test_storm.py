"""A thousand messages, most of them wrong, over sockets that break off, against the real engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from foresay.server.api.responses.store import Responses
from foresay.server.engine_process.client import EngineClient
from foresay.server.http.app import create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.service import Service, Text
from foresay.server.settings.config import ServeConfig
from tests.responses.bare import BINARY, CLOSE, PING, PONG, TEXT, Bare
from tests.responses.test_socket import LAST
from tests.server.staying import alone, service_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
MESSAGES = 1000
PER_SOCKET = 25
LARGEST = 20_000
#: What the protocol allows the server to close with here; None: the client was gone.
CODES = {None, 1002, 1003, 1007, 1009}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(checking_engines: None) -> AsyncIterator[tuple[Service, EngineClient, int]]:
    """A server around the real engine with the bundled pair: its service, its engine, its port."""
    config = ServeConfig(max_seqs=4)
    engine = EngineClient(config)
    await engine.start()
    await engine.until_ready()
    service = service_of(engine, Text.load(config), model="bundled")
    async with TestServer(create_app(alone(service), AuthMiddleware(largest_body=LARGEST))) as server:
        yield service, engine, int(server.port or 0)
    await engine.stop()


class Visit:
    """One socket: what was sent and what came back.

    wanted: messages that must be answered by an error or by the end of a response.
    """

    def __init__(self, bare: Bare, rng: random.Random) -> None:
        self.bare, self.rng = bare, rng
        self.wanted = self.answered = 0
        self.events: Counter[str] = Counter()
        self.code: int | None = None
        self.gone = False
        self.numbers: dict[str, int] = {}

    async def listen(self) -> None:
        """Check every frame; ends with the connection."""
        try:
            while True:
                opcode, data = await self.bare.read()
                if opcode == CLOSE:
                    self.code = int.from_bytes(data[:2], "big")
                elif opcode == TEXT:
                    self.heard(json.loads(data))
                else:
                    assert opcode in (PING, PONG)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def heard(self, event: dict[str, Any]) -> None:
        self.events[event["type"]] += 1
        self.answered += event["type"] in LAST
        if event["type"] == "error":
            assert event["status"] in (400, 404, 409, 429) and event["error"]["message"], event
            assert event["error"]["type"] in ("invalid_request_error", "rate_limit_error"), event
        elif event["type"] == "response.created":
            self.numbers[event["response"]["id"]] = 0
        elif "response" in event:
            last = self.numbers[event["response"]["id"]]
            assert event["sequence_number"] > last
            self.numbers[event["response"]["id"]] = event["sequence_number"]

    async def message(self) -> None:
        """Send one message of some kind."""
        kinds = {
            self.create: 12,
            self.nonsense: 30,
            self.wrong_field: 30,
            self.cancel: 12,
            self.fragments: 8,
            self.unknown: 6,
            self.fatal: 2,
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        await kind()

    async def create(self) -> None:
        self.wanted += 1
        fields: dict[str, Any] = {"max_output_tokens": self.rng.randint(1, 3), "stream_id": self.lane()}
        fields |= {"input": "fox " * self.rng.randint(1, 9), "store": self.rng.random() < 0.3}
        await self.bare.create(**fields, generate=self.rng.random() < 0.8)

    async def nonsense(self) -> None:
        self.wanted += 1
        text = "".join(self.rng.choices('{}[]":,abc0\\ \u2028é', k=self.rng.randint(0, 60)))
        await self.bare.send(text.encode())

    async def wrong_field(self) -> None:
        self.wanted += 1
        wrong: dict[str, Any] = {
            "temperature": self.rng.choice([9, -1, "hot", []]),
            "input": self.rng.choice([7, [{}], [{"role": "nobody", "content": "x"}], None, []]),
            "max_output_tokens": self.rng.choice([0, -5, 1 << 40, "many"]),
            "previous_response_id": self.rng.choice(["resp_unknown", 7]),
            "tools": [{"type": "web_search"}],
            "background": True,
            "stream_id": self.rng.choice([7, "x" * 999]),
            "model": "another",
            "text": {"format": {"type": "xml"}},
        }
        field = self.rng.choice(list(wrong))
        await self.bare.create(**({"input": "x", "max_output_tokens": 1} | {field: wrong[field]}))

    async def cancel(self) -> None:
        which: dict[str, Any] = self.rng.choice([{}, {"stream_id": self.lane()}, {"response_id": self.some_response()}])
        await self.bare.send({"type": "response.cancel"} | which)

    async def unknown(self) -> None:
        self.wanted += 1
        await self.bare.send({"type": self.rng.choice(["response.make", "session.update", "", 7, None])})

    async def fragments(self) -> None:
        self.wanted += 1
        data = json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 1}).encode()
        cut = self.rng.randrange(len(data))
        await self.bare.send(data[:cut], final=False)
        await self.bare.send(b"ping", opcode=PING)
        await self.bare.send(data[cut:], opcode=0)

    async def fatal(self) -> None:
        """What ends a connection."""
        await self.rng.choice(
            [
                lambda: self.bare.send(b'"\xff\xfe"'),
                lambda: self.bare.send(b"x", opcode=0),
                lambda: self.bare.send(b"x", opcode=11),
                lambda: self.bare.send(b"{}", opcode=BINARY),
                lambda: self.bare.send(b" " * (LARGEST + 1)),
                self.leave,
                self.half_close,
            ]
        )()
        self.gone = True

    async def leave(self) -> None:
        self.bare.vanish()

    async def half_close(self) -> None:
        self.bare.half_close()

    def lane(self) -> str | None:
        return self.rng.choice([None, "a", "b", "c"])

    def some_response(self) -> str:
        return self.rng.choice(["resp_unknown", *self.numbers])


async def visit(port: int, rng: random.Random, count: int) -> tuple[int, Visit]:
    """Send up to ``count`` messages over one socket; how many went out."""
    async with await Bare.connect(port, receive_buffer=1 << 16) as bare:
        one, sent = Visit(bare, rng), 0
        listening = asyncio.create_task(one.listen())
        try:
            while sent < count and not one.gone and not listening.done():
                await one.message()
                sent += 1
        except ConnectionError:
            one.gone = True
        async with asyncio.timeout(120):
            while not listening.done() and (one.gone or one.answered < one.wanted):
                await asyncio.sleep(0.01)
        if not one.gone:
            await asyncio.sleep(0.05)  # nothing more may come
            assert one.answered == one.wanted
            await bare.send((1000).to_bytes(2, "big"), opcode=CLOSE)
        await listening
        assert one.code in (CODES if one.gone else {1000})
        return sent, one


@pytest.mark.parametrize("seed", [20261121])
async def test_a_thousand_messages(real, seed):
    service, engine, port = real
    rng = random.Random(seed)
    before = asyncio.all_tasks()
    sent = 0
    events: Counter[str] = Counter()
    codes: Counter[int | None] = Counter()
    while sent < MESSAGES:
        visits = [visit(port, random.Random(rng.random()), PER_SOCKET) for _ in range(4)]
        for count, one in await asyncio.gather(*visits):
            sent += count
            events += one.events
            codes[one.code] += 1
    async with asyncio.timeout(60):
        while service.server.on_drain or service.server.of(Responses).running or service.running:
            await asyncio.sleep(0.01)
        while left := {task for task in asyncio.all_tasks() - before if not task.done()}:
            await asyncio.sleep(0.01)
    assert not left
    assert events["error"] > 500 and events["response.completed"] + events["response.incomplete"] > 50
    assert len(codes) > 3, codes
    assert engine.status.starts == 1


async def test_the_engine_still_answers(real):
    _, engine, port = real
    for _ in range(2):
        async with await Bare.connect(port, receive_buffer=1 << 16) as bare:
            await bare.create(input="Hello", max_output_tokens=2)
            async with asyncio.timeout(60):
                while (event := await bare.event())["type"] not in LAST:
                    pass
        assert event["response"]["usage"]["output_tokens"] == 2
    assert engine.status.starts == 1, "after the first of these the page ledger added up"
