"""A self-check without a server: requests go through it to an engine, and what it counts can be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import cast

from aiohttp import web

from foresay.server.engine.generation import ServedEngine
from foresay.server.metrics.records import SelfCheckCounts
from foresay.server.metrics.selfcheck import SelfCheck
from foresay.server.text.choice import Choice
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from tests.server.scripted import ScriptedEngine
from tests.server.wire import until

PATIENCE = 60.0


def request(id: str, **fields: object) -> Request:
    """A request; fields: of it, and of its sampling."""
    own = {name: fields.pop(name) for name in list(fields) if name in Request.__struct_fields__}
    given = {"prompt": [5, 6, 7], "params": SamplingParams(**{"max_tokens": 12, **fields})} | own  # type: ignore[arg-type]
    return Request(id=id, **given)  # type: ignore[arg-type]


class Reader:
    """A sink that keeps what it gets, and what the self-check reads of a choice. watched: closed at its end."""

    def __init__(self, asked: Request) -> None:
        self.request, self.seed, self.finished = asked, 0, False
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.over, self.watched = asyncio.Event(), ExitStack()

    def put(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        if delta.finish_reason is not None:
            self.seed, self.finished = delta.seed, True
            self._end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.watched.close()
        self.over.set()


class Checking:
    """The self-check, its counts, and the event that a service would keep."""

    def __init__(self, engine: ServedEngine, share: float, chance: Callable[[], float]) -> None:
        self.counts, self.idle, self.taking = SelfCheckCounts(), asyncio.Event(), True
        self.idle.set()
        self.check = SelfCheck(engine, share, self.counts, self.idle, lambda: self.taking, chance)
        self.engine = engine

    def begin(self, requests: Request) -> Reader:
        """A client's request."""
        self.idle.clear()
        reader = Reader(requests)
        reader.watched.enter_context(self.check.watching([cast(Choice, reader)]))
        self.engine.add(requests, reader)
        return reader

    async def ask(self, *requests: Request) -> list[Reader]:
        """Clients' requests, all at once, to their ends."""
        readers = [self.begin(one) for one in requests]
        for reader in readers:
            await asyncio.wait_for(reader.over.wait(), PATIENCE)
        self.idle.set()
        return readers

    async def settled(self, answers: int) -> None:
        """Wait until so many have been checked or skipped."""
        await until(lambda: self.counts.self_check_requests + self.counts.self_check_skipped >= answers)


@asynccontextmanager
async def checking(
    engine: ServedEngine, share: float = 1.0, chance: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[Checking]:
    """A self-check that runs. chance: what it draws for each request."""
    checker = Checking(engine, share, chance)
    async with asynccontextmanager(checker.check.life)(web.Application()):
        yield checker


class Diverging(ScriptedEngine):
    """Plain decoding emits something else from output position ``differs_at`` on."""

    differs_at = 5

    def script_of(self, request: Request) -> list[int]:
        if request.speculate:
            return self.tokens
        return [*self.tokens[: self.differs_at], *(token + 1 for token in self.tokens[self.differs_at :])]
