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

from bench.soak.answers import LAST, Said
from bench.soak.requests import PATHS, Ask, Json

#: After so long an answer never comes: the longest takes seconds, a restart of the engine less than this.
PATIENCE = 240.0
SLOW_SECONDS = 0.15
LONGEST_LINE = 1 << 24


@dataclass(slots=True)
class Heard:
    """One turn: the request, the answer, and when it came.

    status: of HTTP, or of an error. left: the client went away. lost: it ended with an error while the engine was gone,
    because the soak had harmed it. broken: an event that must never happen. pieces: when each text delta came.
    """

    ask: Ask
    body: Json
    said: Said = field(default_factory=Said)
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
        if self.said.error is not None:
            return ("not taken" if self.status == 503 else "lost") if self.lost else "refused"
        return "answered" if self.said.over else "left" if self.left else "cancelled"

    @property
    def comparable(self) -> bool:
        """Whether anything was received that could be wrong."""
        refused = self.said.error is not None and not self.lost
        return not self.broken and (self.said.over or bool(self.said.parts) or refused)

    @property
    def reason(self) -> Any:
        """Why it was refused, in the words that every envelope has."""
        error = None if self.said.error is None else self.said.error["error"]
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
        self.said.hear(self.ask.door, event)
        self.status = event.get("status", self.status) if event.get("type") == "error" else self.status
        if self.ask.conduct == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        return self.ask.conduct in ("reads", "slow") or self.events != self.ask.after + 1


def session(port: int) -> aiohttp.ClientSession:
    """A client of the server on this port, with its own connections."""
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, read_bufsize=LONGEST_LINE)


async def visit(client: aiohttp.ClientSession, asks: list[Ask]) -> list[list[Heard]]:
    """Send what belongs together; the turns of each conversation, as far as they were sent."""
    if asks[0].door == "socket":
        return await _over_socket(client, asks)
    return [await conversation(client, ask) for ask in asks]


# -- HTTP ------------------------------------------------------------------------------------------------------------


async def conversation(client: aiohttp.ClientSession, ask: Ask, bodies: tuple[Json, ...] = ()) -> list[Heard]:
    """Its turns, one after the other, as long as each is complete. bodies: instead of the request's own."""
    turns: list[Heard] = []
    for body in followed(bodies or ask.bodies, turns):
        turns.append(Heard(ask, body))
        await _within_patience(turns[-1], _exchange(client, turns[-1]))
    return turns


def followed(bodies: tuple[Json, ...], turns: list[Heard]) -> Iterator[Json]:
    """The body of each turn, which continues the one before, as long as that is complete."""
    for body in bodies:
        if turns and not turns[-1].said.over:
            return
        yield body | ({"previous_response_id": turns[-1].said.id} if turns else {})


async def _within_patience(heard: Heard, exchange: Any) -> None:
    """Wait for its end, whatever it is, within ``PATIENCE``."""
    try:
        async with asyncio.timeout(PATIENCE):
            await exchange
    except TimeoutError:
        heard.broken = f"nothing came to an end in {PATIENCE:.0f} s"
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        heard.broken = heard.broken or f"{type(error).__name__}: {error}"
    heard.ended = time.monotonic()


async def _exchange(client: aiohttp.ClientSession, heard: Heard) -> None:
    """One request over HTTP. A client that leaves an answer sent whole does so some time after the request."""
    ask = heard.ask
    leaves = ask.conduct in ("leaves", "cancels") and not heard.body.get("stream")
    try:
        async with asyncio.timeout(0.05 * ask.after if leaves else None):
            async with client.post(PATHS[ask.door], json=heard.body) as response:
                heard.status = response.status
                if response.content_type in ("text/event-stream", "application/x-ndjson"):
                    await _follow(client, heard, response)
                else:
                    _take(heard, json.loads(await response.read()))
    except TimeoutError:
        if not leaves:
            raise
        heard.left = True


def _take(heard: Heard, body: Json) -> None:
    if heard.status == 200:
        heard.said.whole(heard.ask.door, body)
    else:
        heard.said.error = body


async def _follow(client: aiohttp.ClientSession, heard: Heard, response: aiohttp.ClientResponse) -> None:
    """Read a stream to its end, or leave it."""
    async for event in _events(heard, response):
        if not await heard.event(event):
            if heard.ask.conduct == "cancels" and heard.said.id:
                await (await client.post(f"{PATHS['responses']}/{heard.said.id}/cancel")).release()
                continue
            heard.left = True
            response.close()
            return
    if not heard.said.over and not heard.said.cut and heard.said.error is None:
        heard.broken = "the stream ended without an end"


async def _events(heard: Heard, response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The JSON of each line that has any."""
    async for line in response.content:
        text = line.strip().removeprefix(b"data: ")
        if text == b"[DONE]":
            heard.said.over = heard.said.error is None
        elif text.startswith(b"{"):
            yield json.loads(text)


# -- WebSockets ------------------------------------------------------------------------------------------------------


async def _over_socket(client: aiohttp.ClientSession, asks: list[Ask]) -> list[list[Heard]]:
    """Several conversations at the same time over one socket, each in its own lane."""
    try:
        socket = await client.ws_connect(PATHS["socket"], max_msg_size=0)
    except aiohttp.WSServerHandshakeError as error:
        return [[refused(ask, error)] for ask in asks]
    async with socket:
        lanes = Lanes(socket)
        listening = asyncio.create_task(lanes.listen())
        talks = await asyncio.gather(*(_talk(lanes, f"lane {n}", ask) for n, ask in enumerate(asks)))
    await listening
    return list(talks)


def refused(ask: Ask, error: aiohttp.WSServerHandshakeError) -> Heard:
    """The outcome of a request for which no socket was opened."""
    heard = Heard(ask, ask.bodies[0], status=error.status, ended=time.monotonic())
    heard.said.error = {"error": error.message}
    return heard


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


async def _talk(lanes: Lanes, lane: str, ask: Ask) -> list[Heard]:
    """A conversation in its lane."""
    turns: list[Heard] = []
    for body in followed(ask.bodies, turns):
        turns.append(Heard(ask, body))
        await _within_patience(turns[-1], _turn(lanes, lane, turns[-1]))
    return turns


async def _turn(lanes: Lanes, lane: str, heard: Heard) -> None:
    """One response. A client that leaves closes the socket, whatever else runs on it."""
    queue = lanes.queues.setdefault(lane, asyncio.Queue())
    fields = {name: value for name, value in heard.body.items() if name != "stream"}
    await lanes.send({"type": "response.create", "stream_id": lane} | fields)
    while (event := await queue.get()) is not None:
        enough = not await heard.event(event)
        if event["type"] in (*LAST, "error"):
            return
        if enough and heard.ask.conduct == "leaves":
            heard.left = True
            await lanes.socket.close()
        elif enough:
            await lanes.send({"type": "response.cancel", "stream_id": lane})
    heard.left = True
    if lanes.socket.close_code not in (1000, 1006, None):
        heard.broken = f"the socket was closed with {lanes.socket.close_code}"
