"""The lanes of a WebSocket: responses of one lane follow each other, those of different lanes run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from weakref import WeakValueDictionary

from foresay.server.api.responses.events import Create
from foresay.server.api.responses.turn import ResponseTurn
from foresay.server.gateway.caller import Shared
from foresay.server.schemas.errors import ApiError


class LaneRequest:
    """What a client asks for. lane: held by the one whose turn it is. begun: it has its turn; turn: what it does, once
    that is prepared."""

    def __init__(self, create: Create, size: int, lane: asyncio.Lock) -> None:
        self.create, self.size, self.lane = create, size, lane
        self.begun = self.cancelled = False
        self.turn: ResponseTurn | None = None
        self.task: asyncio.Task[None] | None = None

    def run(self, turn: ResponseTurn) -> ResponseTurn:
        """``turn`` is what it does."""
        self.turn = turn
        if self.cancelled:
            turn.cancel()
        return turn

    def cancel(self) -> None:
        """End what it does, or will do once it is prepared."""
        self.cancelled = True
        if self.turn is not None:
            self.turn.cancel()


class Lanes:
    """All messages of a socket that run or wait, a task each. answer: serves one. idle: called when all are done.
    bodies: what a message takes its bytes of until it is answered.
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
        """Messages that wait for their turn."""
        return sum(not message.begun for message in self._messages)

    def add(self, create: Create, size: int, refusal: Callable[[], ApiError]) -> None:
        """Serve a message of ``size`` bytes when its lane comes to it, or raise if there is no room for them."""
        self._bodies.take(size, refusal)
        message = LaneRequest(create, size, self._lanes.setdefault(create.stream_id, asyncio.Lock()))
        self._messages.append(message)
        message.task = asyncio.create_task(self._run(message))

    def drop(self, message: LaneRequest) -> None:
        """A message that waits will not run."""
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
            async with message.lane:  # whoever waits for it gets it in the order of their coming
                message.begun = True
                await self._answer(message)
        finally:
            self._leave(message)
        if not self._messages:
            self._idle()
