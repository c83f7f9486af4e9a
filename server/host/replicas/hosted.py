"""What a replica holds: an engine process, and the port at which front doors are let in to ask it."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from foresay.server.engine.generation import EngineStatus
from foresay.server.host.child import Spawned, spawn
from foresay.server.host.client import EngineClient
from foresay.server.host.frames import Failed, pack
from foresay.server.host.replicas.admission import MOST_STRANGERS, admit, hang_up, still_open
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import EngineInfo
from foresay.spec.trace import StepTrace

#: A step that is older tells nothing of now: what was cancelled ends without one.
STALE_SECONDS = 30.0


class Address(msgspec.Struct, frozen=True):
    """Where a replica is asked. deployed: number of the settings that it runs with. text: two of which this is alike
    write the same text."""

    name: str
    host: str
    port: int
    secret: bytes
    deployed: int
    text: str


class Watcher(EngineClient):
    """An engine client that says how each engine process ended. ended: told why, and whether of a request, as far as
    the process could not say so itself."""

    def __init__(self, config: ServeConfig, spawn: Callable[[], Spawned], ended: Callable[[str, bool], None]) -> None:
        super().__init__(config, spawn)
        self._ended = ended

    def _lose(self, number: int, reason: str, among: Collection[str] | None = ()) -> None:
        super()._lose(number, reason, among)
        self._ended(reason, among is None)


class Hosted:
    """name: of the replica. host: the address it listens on. deployed, weights: how often settings, and weights
    among them, were changed. start: starts its engine processes. It holds what it hands over to the engine
    itself too, to tell front doors how that ended."""

    def __init__(
        self,
        config: ServeConfig,
        name: str,
        host: str,
        secret: bytes,
        deployed: int = 0,
        weights: int = 0,
        start: Callable[[socket.socket], Spawned] = spawn,
    ) -> None:
        self._start = start
        self.client = Watcher(config, self._spawn, self._show_out)
        self.client.observe = self._stepped
        self._last: StepTrace | None = None
        self._stepped_at = 0.0
        self._name, self._host, self._secret = name, host, secret
        self._deployed, self._weights = deployed, weights
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=MOST_STRANGERS)
        self._listener.setblocking(False)
        self._arrivals: socket.socket | None = None
        self._doors: list[socket.socket] = []
        self._admitting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the engine, wait until it is ready, and let front doors in. Raises what keeps it from being ready."""
        await self.client.start()
        await self.client.until_ready()
        self._admitting = asyncio.create_task(admit(self._listener, self._secret, self._hand_over))

    async def close(self) -> None:
        """End the engine; whoever asks it is shown out."""
        if self._admitting is not None:
            self._admitting.cancel()
        self._listener.close()
        await self.client.stop()
        if self._arrivals is not None:
            self._arrivals.close()
        self._show_out("the replica ends", False)

    @property
    def status(self) -> EngineStatus:
        """What the engine is doing."""
        return self.client.status

    @property
    def address(self) -> Address:
        """Where front doors find it, once it is open."""
        assert self.client.info is not None, "it is open"
        port = int(self._listener.getsockname()[1])
        text = f"{written_by(self.client.info)}; {self._weights}"
        return Address(self._name, self._host, port, self._secret, self._deployed, text)

    @property
    def load(self) -> int:
        """Requests that run and wait, as the last step told; none if that was long ago."""
        stale = time.monotonic() > self._stepped_at + STALE_SECONDS
        return 0 if stale or self._last is None else self._last.running + self._last.waiting

    def _stepped(self, trace: StepTrace) -> None:
        self._last, self._stepped_at = trace, time.monotonic()

    def _spawn(self) -> Spawned:
        ours, theirs = socket.socketpair()
        if self._arrivals is not None:
            self._arrivals.close()
        self._arrivals = ours
        ours.setblocking(False)
        return self._start(theirs)

    def _hand_over(self, connection: socket.socket) -> None:
        assert self._arrivals is not None, "an engine was started"
        socket.send_fds(self._arrivals, [b"!"], [connection.fileno()])
        self._doors = [*still_open(self._doors), connection.dup()]

    def _show_out(self, reason: str, of_a_request: bool) -> None:
        doors, self._doors = still_open(self._doors), []
        whose: list[str] | None = (
            None if of_a_request and len(doors) == 1 else []
        )  # of several doors nobody knows whose it was
        for door in doors:
            with contextlib.suppress(OSError):
                door.send(pack(Failed(reason, running=whose)), socket.MSG_DONTWAIT)
            hang_up(door)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def written_by(info: EngineInfo) -> str:
    """Whatever a text may hang on, besides the weights: numbers are rounded by the kind of machine."""
    machine = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        machine = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    kept = f"{info.dtype} {info.quantization} {info.activations} {info.kv_dtype}"
    return f"{info.target} {kept} {info.device} {info.exact} on {machine}"
