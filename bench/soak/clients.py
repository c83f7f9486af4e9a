"""Clients of the soak: they send what was drawn, over HTTP and WebSockets, and behave as each request specifies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from bench.soak.answers import LAST, Reply
from bench.soak.requests import PATHS, Json, SoakRequest

#: After so long an answer never comes: the longest takes seconds, a restart of the engine less than this.
ANSWER_SECONDS = 240.0
SLOW_SECONDS = 0.15
LONGEST_LINE = 1 << 24


@dataclass(slots=True)
class Received:
    """One turn: the request, the answer, and when it came.

    status: of HTTP, or of an error. left: the client went away. lost: it ended with an error while the engine was gone,
    because the soak had harmed it. broken: an event that must never happen. pieces: when each text delta came.
    """

    request: SoakRequest
    body: Json
    reply: Reply = field(default_factory=Reply)
    status: int = 0
    left: bool = False
    lost: bool = False
    broken: str = ""
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    events: int = 0
    pieces: list[float] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.broken:
            return "broken off"
        if self.reply.error is not None:
            return ("not taken" if self.status == 503 else "lost") if self.lost else "refused"
        return "answered" if self.reply.over else "left" if self.left else "cancelled"

    @property
    def comparable(self) -> bool:
        """Whether anything was received that could be wrong."""
        refused = self.reply.error is not None and not self.lost
        return not self.broken and (self.reply.over or bool(self.reply.parts) or refused)

    @property
    def reason(self) -> Any:
        """Why it was refused, in the words that every envelope has."""
        error = None if self.reply.error is None else self.reply.error["error"]
        return error.get("message") if isinstance(error, dict) else error

    @property
    def longest_gap(self) -> float:
        """Seconds between two text deltas; the first one may wait in the queue."""
        return max((b - a for a, b in pairwise(self.pieces[1:])), default=0.0)

    async def event(self, event: Json) -> bool:
        """Take an event; false if this client has received enough now."""
        self.events += 1
        if "delta" in event.get("type", "delta"):
            self.pieces.append(time.monotonic())
        self.reply.take_event(self.request.api, event)
        self.status = event.get("status", self.status) if event.get("type") == "error" else self.status
        if self.request.conduct == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        return self.request.conduct in ("reads", "slow") or self.events != self.request.after + 1


def session(port: int) -> aiohttp.ClientSession:
    """A client of the server on this port, with its own connections."""
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, read_bufsize=LONGEST_LINE)


async def visit(client: aiohttp.ClientSession, requests: list[SoakRequest]) -> list[list[Received]]:
    """Send what belongs together; the turns of each conversation, as far as they were sent."""
    if requests[0].api == "socket":
        return await _over_socket(client, requests)
    return [await conversation(client, request) for request in requests]


# -- HTTP ------------------------------------------------------------------------------------------------------------


async def conversation(
    client: aiohttp.ClientSession, request: SoakRequest, bodies: tuple[Json, ...] = ()
) -> list[Received]:
    """Its turns, one after the other, as long as each is complete. bodies: instead of the request's own."""
    turns: list[Received] = []
    for body in followed(bodies or request.bodies, turns):
        turns.append(Received(request, body))
        await _within_timeout(turns[-1], _exchange(client, turns[-1]))
    return turns


def followed(bodies: tuple[Json, ...], turns: list[Received]) -> Iterator[Json]:
    """The body of each turn, which continues the one before, as long as that is complete."""
    for body in bodies:
        if turns and not turns[-1].reply.over:
            return
        yield body | ({"previous_response_id": turns[-1].reply.id} if turns else {})


async def _within_timeout(received: Received, exchange: Any) -> None:
    """Wait for its end, whatever it is, within ``ANSWER_SECONDS``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await exchange
    except TimeoutError:
        received.broken = f"nothing came to an end in {ANSWER_SECONDS:.0f} s"
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        received.broken = received.broken or f"{type(error).__name__}: {error}"
    received.ended = time.monotonic()


async def _exchange(client: aiohttp.ClientSession, received: Received) -> None:
    """One request over HTTP. A client that leaves an answer sent whole does so some time after the request."""
    request = received.request
    leaves = request.conduct in ("leaves", "cancels") and not received.body.get("stream")
    try:
        async with asyncio.timeout(0.05 * request.after if leaves else None):
            async with client.post(PATHS[request.api], json=received.body) as response:
                received.status = response.status
                if response.content_type in ("text/event-stream", "application/x-ndjson"):
                    await _follow(client, received, response)
                else:
                    _take(received, json.loads(await response.read()))
    except TimeoutError:
        if not leaves:
            raise
        received.left = True


def _take(received: Received, body: Json) -> None:
    if received.status == 200:
        received.reply.whole(received.request.api, body)
    else:
        received.reply.error = body


async def _follow(client: aiohttp.ClientSession, received: Received, response: aiohttp.ClientResponse) -> None:
    """Read a stream to its end, or leave it."""
    async for event in _events(received, response):
        if not await received.event(event):
            if received.request.conduct == "cancels" and received.reply.id:
                await (await client.post(f"{PATHS['responses']}/{received.reply.id}/cancel")).release()
                continue
            received.left = True
            response.close()
            return
    if not received.reply.over and not received.reply.cut and received.reply.error is None:
        received.broken = "the stream ended without an end"


async def _events(received: Received, response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The JSON of each line that has any."""
    async for line in response.content:
        text = line.strip().removeprefix(b"data: ")
        if text == b"[DONE]":
            received.reply.over = received.reply.error is None and not received.reply.cut
        elif text.startswith(b"{"):
            yield json.loads(text)


# -- WebSockets ------------------------------------------------------------------------------------------------------


async def _over_socket(client: aiohttp.ClientSession, requests: list[SoakRequest]) -> list[list[Received]]:
    """Several conversations at the same time over one socket, each in its own lane."""
    try:
        socket = await client.ws_connect(PATHS["socket"], max_msg_size=0)
    except aiohttp.WSServerHandshakeError as error:
        return [[refused(request, error)] for request in requests]
    async with socket:
        lanes = Lanes(socket)
        listening = asyncio.create_task(lanes.listen())
        talks = await asyncio.gather(*(_talk(lanes, f"lane {n}", request) for n, request in enumerate(requests)))
    await listening
    return list(talks)


def refused(request: SoakRequest, error: aiohttp.WSServerHandshakeError) -> Received:
    """The outcome of a request for which no socket was opened."""
    received = Received(request, request.bodies[0], status=error.status, ended=time.monotonic())
    received.reply.error = {"error": error.message}
    return received


class Lanes:
    """One WebSocket, and a queue of events for each of its lanes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.queues: dict[str, asyncio.Queue[Json | None]] = {}
        self.socket = socket

    async def send(self, message: Json) -> None:
        """Send one message of the client; dropped if the socket is closed."""
        with suppress(ConnectionError, aiohttp.ClientError):
            await self.socket.send_str(json.dumps(message))

    async def listen(self) -> None:
        """Pass every event to its lane; when the socket closes, notify all of them."""
        async for message in self.socket:
            event = json.loads(message.data)
            self.queues[event["stream_id"]].put_nowait(event)
        for queue in self.queues.values():
            queue.put_nowait(None)


async def _talk(lanes: Lanes, lane: str, request: SoakRequest) -> list[Received]:
    """A conversation in its lane."""
    turns: list[Received] = []
    for body in followed(request.bodies, turns):
        turns.append(Received(request, body))
        await _within_timeout(turns[-1], _turn(lanes, lane, turns[-1]))
    return turns


async def _turn(lanes: Lanes, lane: str, received: Received) -> None:
    """One response. A client that leaves closes the socket, whatever else runs on it."""
    queue = lanes.queues.setdefault(lane, asyncio.Queue())
    fields = {name: value for name, value in received.body.items() if name != "stream"}
    await lanes.send({"type": "response.create", "stream_id": lane} | fields)
    while (event := await queue.get()) is not None:
        enough = not await received.event(event)
        if event["type"] in (*LAST, "error"):
            return
        if enough and received.request.conduct == "leaves":
            received.left = True
            await lanes.socket.close()
        elif enough:
            await lanes.send({"type": "response.cancel", "stream_id": lane})
    received.left = True
    if lanes.socket.close_code not in (1000, 1006, None):
        received.broken = f"the socket was closed with {lanes.socket.close_code}"
