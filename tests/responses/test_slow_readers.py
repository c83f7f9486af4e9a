"""Sockets that stop reading do not slow the stream of another: what is measured is processor time."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest

from foresay.server.api.responses.store import Responses, SocketLimits
from foresay.spec.request import Request
from tests.responses.bare import STUCK, Bare
from tests.responses.serving import serving
from tests.server.scripted import ScriptedEngine
from tests.server.wire import until

DEAF = 100
GAPS = 150
MEASURED = GAPS + 10
ROUNDS = 12  # at most


class PacedEngine(ScriptedEngine):
    """As fast as is asked for by ``min_tokens``, of which a scripted engine makes nothing else: milliseconds a step."""

    def add(self, request: Request, sink: Any) -> None:
        paced = PacedEngine.__new__(PacedEngine)
        paced.__dict__ = self.__dict__ | {"pause": request.params.min_tokens / 1000}
        self.requests.append(request)
        self._tasks[request.id] = asyncio.create_task(paced._say(request, sink))


async def gaps(http: Any) -> list[float]:
    """Processor seconds between the deltas of one stream that is read as it comes."""
    async with http.ws_connect("/v1/responses") as socket:
        create = {"input": "Tell", "max_output_tokens": MEASURED, "min_tokens": 5, "ignore_eos": True}
        await socket.send_json({"type": "response.create"} | create)
        arrivals = []
        while len(arrivals) <= GAPS:
            event = await socket.receive_json(timeout=60)
            if event["type"] == "response.output_text.delta":
                arrivals.append(time.thread_time())
    return [b - a for a, b in pairwise(arrivals)]


async def stalled(stack: AsyncExitStack, port: int) -> None:
    """A socket whose response is so large from the first event on that it is stuck at once, and runs on."""
    bare = await stack.enter_async_context(await Bare.connect(port))
    create = {"input": "Tell", "max_output_tokens": 480, "min_tokens": 450, "ignore_eos": True}
    await bare.create(**create, **STUCK, store=False)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.slow
async def test_a_hundred_deaf_sockets_do_not_slow_a_stream(tokenizer):
    engine = PacedEngine(tokenizer.encode("Once upon a time there was a fox. ", False))
    limits = SocketLimits(stall=60.0)
    alone, crowded = [], []
    async with (
        asyncio.timeout(240),
        serving(engine, tokenizer, limits, send_buffer=4096, most_running=1000) as (http, service),
    ):
        for _ in range(ROUNDS):
            alone.append(p99(await gaps(http)))
            async with AsyncExitStack() as stack:
                for _ in range(DEAF):  # one after the other, so that their steps do not fall together
                    await stalled(stack, int(http.port or 0))
                    await asyncio.sleep(0.005)
                await until(lambda: len(service.server.of(Responses).running) == DEAF)
                assert len(service.server.on_drain) == DEAF
                crowded.append(p99(await gaps(http)))
                assert len(service.server.of(Responses).running) >= DEAF, "they were to run all the time"
            await until(lambda: not service.server.on_drain)
            if undisturbed := min(crowded) < 1.2 * min(alone) + 0.002:
                break
    # In one process with its clients, on whatever machine this is: bench.sockets measures it properly.
    assert undisturbed, (min(crowded) / min(alone), alone, crowded)
