"""Engine processes that do what a test says: each is a program that sleeps, really stopped and killed; its engine is in
this process, at the other end of the socket."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from foresay.server.engine_process import frames
from foresay.server.engine_process.child import ENGINE, Spawned
from foresay.server.engine_process.frames import Channel, unpack_up
from foresay.server.settings.config import EngineConfig
from foresay.spec.request import Delta, FinishReason, Request, RequestEnd
from tests.server.scripted import INFO, STEP

SLEEP = Path("/bin/sleep")


def text_of(seed: int, count: int) -> list[int]:
    """What every engine writes with a seed."""
    return [5 + (seed * 7919 + position * position * 31) % 300 for position in range(count)]


class Puppet(Channel):
    """An engine process. config: what it was started with; None before. held: it does not get ready. broken: why its
    settings do not load. running: what it runs, with the tokens so far, in order of arrival."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(lambda frame: None)
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen([stage.program, "600"])
        self.spawned = Spawned(self.process, ours)
        self.config: EngineConfig | None = None
        self.broken, stage.broken = stage.broken, ""
        self.ready, self.frozen, self.dead = False, False, False
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.steps: dict[str, int] = {}
        self._stage, self._finish = stage, set[str]()
        self._opening = asyncio.create_task(self._open(theirs))

    async def _open(self, theirs: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=theirs)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.dead = True
        self.process.kill()

    def kill(self) -> None:
        self.dead = True
        self.process.kill()
        self.close()

    def freeze(self) -> None:
        self.frozen = True
        self.process.send_signal(signal.SIGSTOP)

    def let(self) -> None:
        """It is as far as it can be: ready, unless its settings do not load."""
        if self.config is None or self.ready or self.dead or self.frozen:
            return
        if self.broken:
            self.send(frames.Failed(self.broken, building=True))
            self.kill()
            return
        self.ready = True
        self.send(frames.Ready(replace(INFO, drafter=str(self.config.draft), identity={"of": str(self.config.target)})))

    def _read(self, body: bytes) -> None:
        if self.frozen or self.dead:
            return
        match unpack_up(body):
            case frames.Start(config):
                self.config = config
                self._stage.started.append(self)
            case frames.Add(request):
                self._add(request)
            case frames.Cancel(id):
                self.running.pop(id, None)
            case frames.Finish(id):
                self._finish.add(id)
            case frames.Ping():
                self.send(frames.Pong())
            case frames.Stop():
                self.kill()

    def _add(self, request: Request) -> None:
        """Of those that go on here only one is not proven, and none that is new comes before all of them are."""
        assert self.ready and request.id not in self.running
        unproven = [id for id in self.running if self.running[id][0].progress is not None and self.steps[id] < 2]
        assert unproven == [], "the one before has not shown that it does no harm"
        if request.progress is not None:
            self._stage.resumes[request.id] = self._stage.resumes.get(request.id, 0) + 1
            before = [self._stage.order.index(id) for id in self.running if self.running[id][0].progress is not None]
            assert all(place < self._stage.order.index(request.id) for place in before), "in order of arrival"
            assert not any(each.progress is None for each, _ in self.running.values()), "new ones come later"
        self.running[request.id] = (request, list(request.committed))
        self.steps[request.id] = 0

    def step(self, run: int) -> None:
        """Up to ``run`` tokens of each."""
        if not self.ready or self.frozen or self.dead or not self.running:
            return
        deltas = [self._delta(request, tokens, run) for request, tokens in list(self.running.values())]
        self._stage.steps += 1
        self.send(frames.Deltas(deltas, replace(STEP, number=self._stage.steps)))

    def _delta(self, request: Request, tokens: list[int], run: int) -> Delta:
        seed, most = request.params.seed or 1000 * len(self._stage.started), cast(int, request.params.max_tokens)
        ended = request.id in self._finish
        new = [] if ended else text_of(seed, most)[len(tokens) :][:run]
        tokens += new
        self.steps[request.id] += 1
        reason: FinishReason | None = "stop" if ended else "length" if len(tokens) == most else None
        if reason is not None:
            del self.running[request.id]
        ending = RequestEnd(2) if reason else None
        return Delta(id=request.id, tokens=new, finish_reason=reason, seed=seed, cached_tokens=3, ending=ending)


class Stage:
    """Where engine processes come from. spawned, started: all of them, and those that had their settings. order: of all
    requests. broken: why the next one's settings do not load. resumes: by request, as engines saw them."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / ENGINE.decode()
        self.program.symlink_to(SLEEP)
        self.spawned: list[Puppet] = []
        self.started: list[Puppet] = []
        self.order: list[str] = []
        self.broken, self.steps = "", 0
        self.resumes: dict[str, int] = {}

    def __call__(self) -> Spawned:
        self.spawned.append(Puppet(self))
        return self.spawned[-1].spawned

    @property
    def current(self) -> Puppet | None:
        """The one that loads or runs."""
        return self.started[-1] if self.started and not self.started[-1].dead else None

    def alive(self) -> list[Puppet]:
        return [each for each in self.spawned if each.process.poll() is None]

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.001)
