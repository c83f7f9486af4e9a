"""Engines killed, frozen, reloaded, reloads cut, requests cancelled, models in turn, in any order: every text goes on.

A life is a random list of events; engines are puppets (tests/server/puppets.py), all else is the server's own.
tests/server/test_live_resumption.py has real engines.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from msgspec.structs import replace

from foresay.server.engine.generation import Generation
from foresay.server.engine_process import client
from foresay.server.models.model import Model
from foresay.server.models.models import Models
from foresay.server.models.service import Text
from foresay.server.schemas.errors import Unavailable
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ForesayError
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from tests.server.puppets import Stage, text_of

DRAFTS = ["ngram", "suffix", "none"]
CONFIG = ServeConfig(draft="none", engine_timeout=1.5, max_resumes=1000)
EVENTS = {
    "step": 30, "ask": 8, "send": 6, "let": 14, "leave": 2, "kill": 3, "freeze": 1, "reload": 2, "reload broken": 1,
    "reload another": 1,
}  # fmt: skip


class Client:
    """One request: accepted, prepared until it is sent, and read to its end. cut: where its text ends, if a stop string
    is found there."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.id = world, f"r{len(world.clients)}"
        self.most, self.seed = rng.randint(1, 24), rng.choice([None, rng.randint(1, 99)])
        self.cut = rng.choice([None, None, rng.randint(1, 24)])
        self.model = rng.choice([*world.drafts])
        self.prepared = asyncio.Event()
        self.accepted = self.sent = False
        self.tokens: list[int] = []
        self.last: Delta | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.world.models.lease(self.model) as service:
            self.accepted = True
            await self.prepared.wait()
            params = SamplingParams(max_tokens=self.most, seed=self.seed)
            request = Request(id=self.id, prompt=[1, 2], params=params)
            self.world.stage.order.append(self.id)
            self.sent = True
            async with Generation(service.engine, [request]) as generation:
                while self.last is None:
                    for _, delta in await generation.next():
                        self._take(delta, generation)

    def _take(self, delta: Delta, generation: Generation) -> None:
        before = len(self.tokens)
        self.tokens += delta.tokens
        if self.cut is not None and before < self.cut <= len(self.tokens) and delta.finish_reason is None:
            generation.finish(0, self.cut)
        self.last = delta if delta.finish_reason else None

    def check(self) -> None:
        """All of its text, once, of one seed; and as often resumed as engines say."""
        if self.task.cancelled():
            return
        if isinstance(error := self.task.exception(), Unavailable):
            assert not self.accepted and error.code in ("loading", "engine_down"), error
            return
        assert error is None, (self.id, error)
        assert self.last is not None and self.last.ending is not None
        whole = text_of(self.last.seed, self.most)
        assert self.last.seed == self.seed or self.seed is None
        least = self.most if self.cut is None or self.cut > self.most else self.cut
        assert whole[: len(self.tokens)] == self.tokens and len(self.tokens) >= least
        assert self.last.finish_reason == ("length" if len(self.tokens) == self.most else "stop")
        assert len(self.last.ending.resumed) >= self.world.stage.resumes.get(self.id, 0), "some engines died before"


class World:
    """A server's models on a stage, one of which is loaded at a time; and its clients. drafts: by model, of its
    settings."""

    def __init__(self, stage: Stage, *names: str) -> None:
        self.stage = stage
        self.clients: list[Client] = []
        config = CONFIG if not names else ServeConfig(models=dict.fromkeys(names, CONFIG), max_loaded_models=1)
        self.models = Models.of(config, lambda status: None, stage)
        self.drafts = dict.fromkeys(names or ["bundled"], "none")
        self.reloading: asyncio.Task[Any] | None = None
        self.why: list[str] = []  # reloads failed
        self.losses = 0  # engines that ended before they were ready, since one was

    @property
    def engines(self) -> list[client.EngineClient]:
        return [cast(client.EngineClient, entry.engine) for entry in self.models]

    def happens(self, event: str, rng: random.Random) -> None:
        puppet = self.stage.current
        match event:
            case "step" if puppet is not None:
                puppet.step(rng.randint(1, 4))
            case "ask":
                self.clients.append(Client(self, rng))
                if rng.random() < 0.8:
                    self.clients[-1].prepared.set()
            case "send":
                for each in self.clients:
                    each.prepared.set()
            case "leave" if running := [each for each in self.clients if not each.task.done()]:
                rng.choice(running).task.cancel()
            case "let" if puppet is not None:
                puppet.let()
                self.losses = 0
            case "kill" | "freeze" if puppet is not None and self.losses < 2 and not puppet.frozen:
                self.losses += not puppet.ready
                puppet.kill() if event == "kill" else puppet.freeze()
            case "reload" | "reload broken" | "reload another" if not self.reloading and self.runs:
                self.reloading = asyncio.create_task(self._reload(event, *map(rng.choice, ([*self.drafts], DRAFTS))))

    async def _reload(self, event: str, name: str, draft: str) -> None:
        if event == "reload broken" and not self.models.several:  # else it may be out, and what comes is another
            self.stage.broken = "its weights are damaged"
        try:
            config = replace(CONFIG, draft=draft)
            await self.models.reload(self.models.find(name), config, event != "reload another")
            self.drafts[name] = draft
        except ForesayError as error:
            self.why.append(str(error))
        finally:
            self.stage.broken, self.reloading = "", None

    async def end(self) -> None:
        """Let all that goes on end."""
        async with asyncio.timeout(60):
            while self.reloading or not all(each.task.done() for each in self.clients) or not self.runs:
                for each in self.clients:
                    each.prepared.set()
                if (puppet := self.stage.current) is not None:
                    puppet.let()
                    puppet.step(3)
                await asyncio.sleep(0.001)

    @property
    def runs(self) -> bool:
        """Whether there is an engine, and not one that is given up yet."""
        puppet = self.stage.current
        states = [engine.status.state for engine in self.engines]
        return puppet is not None and puppet.ready and not puppet.frozen and "ready" in states


@pytest.fixture(params=[(), ("one", "two")], ids=["a model", "two in turn"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    text = cast(Text, object())

    async def read(self: Model, config: ServeConfig) -> Text:
        return text

    async def peek(self: Model) -> None: ...

    monkeypatch.setattr(Model, "peek", peek)
    for name in ("read", "_read_text"):
        monkeypatch.setattr(Model, name, read)
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.002)
    monkeypatch.setattr(client, "LONGEST_BACKOFF", 0.004)
    stage = Stage(tmp_path)
    world = World(stage, *request.param)
    async for _ in world.models.life(web.Application()):
        await world.models.start()
        yield world
    await world.models.stop()
    assert stage.alive() == [], "no process stays behind"


@pytest.mark.parametrize("seed", [*range(12), *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(12, 300)]])
async def test_whatever_happens_to_its_engine_every_text_goes_on(world: World, seed: int) -> None:
    rng = random.Random(seed)
    if not world.models.several:
        await world.stage.until(lambda: world.stage.current)
        world.happens("let", rng)
        await asyncio.wait_for(world.models.arrived(), 60)
    for event in rng.choices([*EVENTS], [*EVENTS.values()], k=160):
        world.happens(event, rng)
        await asyncio.sleep(0 if rng.random() < 0.8 else 0.01)
    await world.end()
    for each in world.clients:
        each.check()
    puppet, (entry,) = world.stage.current, [entry for entry in world.models if entry.state == "in"]
    assert [(each.leases, each.failure) for each in world.models] == [(0, None)] * len(world.drafts)
    assert [len(engine._in_flight) for engine in world.engines] == [0] * len(world.drafts)
    assert {one: world.models.find(one).service.config.draft for one in world.drafts} == world.drafts
    assert puppet is not None and puppet.config is not None and world.stage.alive() == [puppet]
    assert puppet.config.draft == entry.service.config.draft
    starts = sum(engine.status.starts for engine in world.engines)
    assert starts >= len(world.stage.started), "some were killed before they had their settings"
    assert all(any(word in why for word in ("damaged", "died", "hung")) for why in world.why)
    assert any(each.sent for each in world.clients)
