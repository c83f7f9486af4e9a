"""Replicas in this process, without Ray: real engine processes, real sockets, and a cluster that is a list."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from msgspec.structs import replace

from foresay.server.engine.generation import generate
from foresay.server.engine_process.client_base import Progress
from foresay.server.replicas.fleet import Fleet
from foresay.server.replicas.hosted import Address, Hosted
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams

SECONDS = 180.0
CONFIG = ServeConfig(draft="none", max_seqs=4, max_model_len=1024, engine_timeout=SECONDS)
PARAMS = SamplingParams(max_tokens=300, temperature=1.0, seed=7, ignore_eos=True)
ASKED = [
    Request(id="drawn", prompt=[5, 6, 7], params=PARAMS),
    Request(id="greedy", prompt=[5, 6, 8], params=replace(PARAMS, temperature=0.0, repetition_penalty=1.2, logprobs=1)),
    Request(id="unseeded", prompt=[5, 6, 9], params=replace(PARAMS, seed=11, presence_penalty=0.5)),
]


class Local:
    """A :class:`~foresay.server.replicas.fleet.Cluster` of replicas that a test starts and ends."""

    def __init__(self) -> None:
        self.hosted: dict[str, Hosted] = {}
        self.coming: dict[str, Hosted] = {}
        self.wrong: dict[str, Address] = {}  # listed with them

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.gather(*[one.close() for one in (*self.hosted.values(), *self.coming.values())])

    async def start(self, *names: str, config: ServeConfig = CONFIG, deployed: int = 1) -> None:
        """More replicas, once they are ready; those of other settings come when they are deployed."""
        made = {name: Hosted(config, name, "127.0.0.1", os.urandom(32), deployed) for name in names}
        await asyncio.wait_for(asyncio.gather(*[hosted.open() for hosted in made.values()]), SECONDS)
        (self.hosted if config is CONFIG else self.coming).update(made)

    async def open(self, config: ServeConfig, tell: Progress) -> None:
        """They are there."""

    async def addresses(self) -> list[Address]:
        """As they are now."""
        return [*(one.address for one in self.hosted.values()), *self.wrong.values()]

    async def deploy(self, config: ServeConfig) -> int:
        """Those that were started for it come, one by one."""
        for old, new in zip(list(self.hosted), list(self.coming), strict=True):
            self.hosted[new] = self.coming.pop(new)
            await self.hosted.pop(old).close()
        return 2

    async def close(self) -> None:
        """Others may ask them."""


@asynccontextmanager
async def asking(cluster: Local) -> AsyncIterator[Fleet]:
    """A front door of these replicas."""
    fleet = Fleet(replace(CONFIG, max_resumes=100), cluster)
    await fleet.start()
    try:
        await asyncio.wait_for(fleet.until_ready(), SECONDS)
        async with asyncio.timeout(SECONDS):
            while len(fleet.ready) < len(cluster.hosted):
                await asyncio.sleep(0.02)
        yield fleet
    finally:
        await fleet.stop()


async def written(fleet: Fleet, request: Request, begun: asyncio.Event | None = None) -> list[Delta]:
    """Its deltas. begun: set once some tokens are there."""
    deltas: list[Delta] = []
    async for delta in generate(fleet, request):
        deltas.append(delta)
        if begun is not None and sum(len(one.tokens) for one in deltas) > 8:
            begun.set()
    return deltas


def text(deltas: list[Delta]) -> list[int]:
    """What came."""
    return [token for delta in deltas for token in delta.tokens]
