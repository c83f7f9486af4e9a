"""The lanes of a WebSocket: responses of one lane follow each other, those of different lanes run side by side."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from server.responses.turn import Turn
from server.wire.response_events import Create

log = logging.getLogger("foresay.server")


class Lane:
    """What one lane has to do. turn: what it does now, once that is prepared."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.waiting: deque[Create] = deque()
        self.turn: Turn | None = None
        self.cancelled = False  # the message that is being prepared need not run
        self.task: asyncio.Task[None] | None = None

    def run(self, turn: Turn) -> Turn:
        """``turn`` is what the lane does now."""
        self.turn = turn
        if self.cancelled:
            turn.cancel()
        return turn

    def cancel(self) -> list[Create]:
        """End what runs; returns the messages that were still waiting and will not run."""
        self.cancelled = True
        if self.turn is not None:
            self.turn.cancel()
        dropped = list(self.waiting)
        self.waiting.clear()
        return dropped


class Lanes:
    """All lanes of a socket that have something to do. answer: serves one message. idle: called when all are done."""

    def __init__(self, answer: Callable[[Lane, Create], Awaitable[None]], idle: Callable[[], None]) -> None:
        self._answer, self._idle = answer, idle
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

    def add(self, create: Create) -> None:
        """Serve a message when its lane comes to it."""
        lane = self._lanes.get(create.stream_id)
        if lane is None:
            lane = self._lanes[create.stream_id] = Lane(create.stream_id)
        lane.waiting.append(create)
        if lane.task is None:
            lane.task = asyncio.create_task(self._run(lane))

    def get(self, stream_id: str) -> Lane | None:
        """The lane of that name, if it has something to do."""
        return self._lanes.get(stream_id)

    async def end(self) -> None:
        """Stop everything and wait until it has stopped."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lane: Lane) -> None:
        try:
            while lane.waiting:
                lane.turn, lane.cancelled = None, False
                await self._answer(lane, lane.waiting.popleft())
        finally:
            del self._lanes[lane.stream_id]
        if not self._lanes:
            self._idle()
