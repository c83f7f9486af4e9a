"""The lanes of a WebSocket: responses of one lane run one after the other, those of different lanes in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from weakref import WeakValueDictionary

from foresay.server.api.responses.events import Create
from foresay.server.api.responses.turn import ResponseTurn
from foresay.server.gateway.caller import Shared
from foresay.server.schemas.errors import ApiError


class LaneRequest:
    """A client's request. lane: a lock held by the lane's running request. begun: it holds the lock; turn: the response
    that it runs, once prepared."""

    def __init__(self, create: Create, size: int, lane: asyncio.Lock) -> None:
        self.create, self.size, self.lane = create, size, lane
        self.begun = self.cancelled = False
        self.turn: ResponseTurn | None = None
        self.task: asyncio.Task[None] | None = None

    def run(self, turn: ResponseTurn) -> ResponseTurn:
        """Set the turn that it runs."""
        self.turn = turn
        if self.cancelled:
            turn.cancel()
        return turn

    def cancel(self) -> None:
        """End its turn, now or once prepared."""
        self.cancelled = True
        if self.turn is not None:
            self.turn.cancel()


class Lanes:
    """All running or waiting messages of a socket, each with a task. answer: serves one. idle: called when all are
    done.
    bodies: the budget that a message's bytes are taken from until it is answered.
    """

    def __init__(
        self, answer: Callable[[LaneRequest], Awaitable[None]], idle: Callable[[], None], bodies: Shared
    ) -> None:
        self._answer, self._idle, self._bodies = answer, idle, bodies
        self._messages: list[LaneRequest] = []
        self._lanes: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()

    def __iter__(self) -> Iterator[LaneRequest]:
        return iter(list(self._messages))

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._messages)

    @property
    def waiting(self) -> int:
        """Number of messages that wait for their lane."""
        return sum(not message.begun for message in self._messages)

    def add(self, create: Create, size: int, refusal: Callable[[], ApiError]) -> None:
        """Queue a message of ``size`` bytes in its lane, or raise ``refusal`` if there is no room for the bytes."""
        self._bodies.take(size, refusal)
        message = LaneRequest(create, size, self._lanes.setdefault(create.stream_id, asyncio.Lock()))
        self._messages.append(message)
        message.task = asyncio.create_task(self._run(message))

    def drop(self, message: LaneRequest) -> None:
        """Drop a waiting message."""
        self._leave(message)
        if message.task is not None:
            message.task.cancel()

    async def end(self) -> None:
        """Stop everything and wait until it has stopped."""
        messages = list(self)
        for message in messages:
            self.drop(message)
        await asyncio.gather(*(message.task for message in messages if message.task), return_exceptions=True)

    def _leave(self, message: LaneRequest) -> None:
        if message in self._messages:
            self._messages.remove(message)
            self._bodies.give(message.size)

    async def _run(self, message: LaneRequest) -> None:
        try:
            async with message.lane:  # granted in order of arrival
                message.begun = True
                await self._answer(message)
        finally:
            self._leave(message)
        if not self._messages:
            self._idle()
