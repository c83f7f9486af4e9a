"""The lanes of a WebSocket: responses of one lane follow each other, those of different lanes run side by side."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from server.api.responses.events import Create
from server.api.responses.turn import Turn
from server.gateway.caller import Shared
from server.schemas.errors import ApiError

log = logging.getLogger("foresay.server")


class Message(NamedTuple):
    """What a client asks for. size: its bytes."""

    create: Create
    size: int


class Lane:
    """What one lane has to do. turn: what it does now, once that is prepared."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.waiting: deque[Message] = deque()
        self.turn: Turn | None = None
        self.cancelled = False  # the message that is being prepared need not run
        self.task: asyncio.Task[None] | None = None

    def run(self, turn: Turn) -> Turn:
        """``turn`` is what the lane does now."""
        self.turn = turn
        if self.cancelled:
            turn.cancel()
        return turn


class Lanes:
    """All lanes of a socket that have something to do. answer: serves one message. idle: called when all are done.
    bodies: what a message takes its bytes of until it is answered.
    """

    def __init__(
        self, answer: Callable[[Lane, Create], Awaitable[None]], idle: Callable[[], None], bodies: Shared
    ) -> None:
        self._answer, self._idle = answer, idle
        self._bodies, self._held = bodies, 0
        self._lanes: dict[str | None, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._lanes)

    @property
    def waiting(self) -> int:
        """Messages that wait for their turn."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def add(self, create: Create, size: int, refusal: Callable[[], ApiError]) -> None:
        """Serve a message of ``size`` bytes when its lane comes to it, or raise if there is no room for them."""
        self._bodies.take(size, refusal)
        self._held += size
        lane = self._lanes.get(create.stream_id)
        if lane is None:
            lane = self._lanes[create.stream_id] = Lane(create.stream_id)
        lane.waiting.append(Message(create, size))
        if lane.task is None:
            lane.task = asyncio.create_task(self._run(lane))

    def cancel(self, lane: Lane) -> list[Create]:
        """End what runs there; returns the messages that were still waiting and will not run."""
        lane.cancelled = True
        if lane.turn is not None:
            lane.turn.cancel()
        dropped = list(lane.waiting)
        lane.waiting.clear()
        self._release(sum(message.size for message in dropped))
        return [message.create for message in dropped]

    def get(self, stream_id: str) -> Lane | None:
        """The lane of that name, if it has something to do."""
        return self._lanes.get(stream_id)

    async def end(self) -> None:
        """Stop everything and wait until it has stopped."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._release(self._held)

    def _release(self, size: int) -> None:
        self._held -= size
        self._bodies.give(size)

    async def _run(self, lane: Lane) -> None:
        try:
            while lane.waiting:
                lane.turn, lane.cancelled = None, False
                message = lane.waiting.popleft()
                await self._answer(lane, message.create)
                self._release(message.size)
        finally:
            del self._lanes[lane.stream_id]
        if not self._lanes:
            self._idle()
