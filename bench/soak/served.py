"""A server of the soak's own: its processes, their memory, and what it reports at a quiet moment."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench import serving
from bench.soak.clients import session

#: An engine of the bundled target starts in seconds; this is for large ones on busy machines.
RETURN_SECONDS = 300.0
QUIET_SECONDS = 60.0
#: The error of a step that was made to fail (failing/sitecustomize.py).
MADE = "a step was made to fail"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Quiet:
    """What is left without any request. pages: of the KV cache that are still held. Memory in MB."""

    at: float
    running: int
    waiting: int
    sockets: int
    pages: int
    descriptors: int
    server_mb: float
    engine_mb: float
    totals: dict[str, int]


class Served:
    """One ``foresay serve``. log: its stderr."""

    def __init__(self, process_id: int, port: int, log: Path) -> None:
        self.process_id, self.port, self.log = process_id, port, log
        self.client = session(port)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.close()

    @property
    def engine_id(self) -> int | None:
        """The engine process that runs now."""
        return engine_of(self.process_id)

    # -- harm ----------------------------------------------------------------------------------------------------

    async def kill(self, fails: bool) -> float:
        """Kill the engine, or make its next step fail; the seconds until requests are accepted again."""
        gone, begun = self._signal(signal.SIGUSR1 if fails else signal.SIGKILL), time.monotonic()
        back = asyncio.create_task(self._until_back(gone, begun))
        if fails:
            await self._step()  # an idle engine makes none by itself
        return await back

    async def freeze(self, seconds: float) -> float | None:
        """Stop the engine for some time. If it was ended meanwhile: the seconds until requests are accepted again."""
        begun, frozen = time.monotonic(), self._signal(signal.SIGSTOP)
        while self.engine_id == frozen and time.monotonic() < begun + seconds:
            await asyncio.sleep(0.05)
        if self.engine_id == frozen:
            self._signal(signal.SIGCONT)
            return None
        return await self._until_back(frozen, begun)

    def _signal(self, number: int) -> int:
        engine = self.engine_id
        assert engine is not None, "harm is done to an engine that is there"
        os.kill(engine, number)
        return engine

    async def _step(self) -> int:
        """Cause a step; the status of its answer."""
        async with self.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
            return response.status

    async def _until_back(self, gone: int, begun: float) -> float:
        """Wait until another engine is ready. TimeoutError if none is."""
        async with asyncio.timeout(RETURN_SECONDS):
            while self.engine_id in (gone, None) or not await self.ready():
                await asyncio.sleep(0.1)
        return time.monotonic() - begun

    async def ready(self) -> bool:
        """Whether it accepts requests."""
        async with self.client.get("/ready") as response:
            return response.status == 200

    # -- quiet ---------------------------------------------------------------------------------------------------

    async def model(self) -> dict[str, Any]:
        """The model that it serves, from ``/server_info``."""
        info: dict[str, Any] = await self._json("/server_info")
        return info

    async def quiet(self, descriptors: int | None = None) -> Quiet:
        """Wait until nothing runs, make one step, and read what is held after it. descriptors: so many may be open."""
        await self._until_idle(descriptors)
        # After a cancel no step would report the pages, so one is requested.
        assert await self._step() == 200, "it is ready"
        state = await self._a_second_later()
        load, engine = await self._json("/load"), self.engine_id
        return Quiet(
            at=time.monotonic(),
            running=load["running"],
            waiting=load["waiting"],
            sockets=await self._sockets(),
            pages=[one for one in state["history"]["seconds"] if one["steps"]][-1]["pages"],
            descriptors=self.descriptors,
            server_mb=resident(self.process_id),
            engine_mb=resident(engine) if engine else 0.0,
            totals=state["snapshot"]["totals"],
        )

    async def _a_second_later(self) -> Any:
        """The dashboard's numbers, once they include the running second."""
        second = int((await self._json("/dashboard/state"))["history"]["now"])
        while int((state := await self._json("/dashboard/state"))["history"]["now"]) <= second:
            await asyncio.sleep(0.1)
        return state

    async def _until_idle(self, descriptors: int | None) -> None:
        """Wait for requests that clients left: they end within moments, or are visible in what is read afterwards."""
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                while any((await self._json("/load")).values()) or await self._sockets():
                    await asyncio.sleep(0.1)
                while descriptors is not None and self.descriptors > descriptors:
                    await asyncio.sleep(0.1)

    async def _sockets(self) -> int:
        async with self.client.get("/metrics") as response:
            found = re.search(r"websocket_connections_active(?:\{[^}]*\})? ([0-9.]+)", await response.text())
        return int(float(found[1])) if found else 0

    async def _json(self, path: str) -> Any:
        async with self.client.get(path) as response:
            return await response.json()

    @property
    def descriptors(self) -> int:
        """Files and sockets that the server has open."""
        return len(list(Path(f"/proc/{self.process_id}/fd").iterdir()))

    @property
    def mistakes(self) -> list[str]:
        """The unforeseen errors in its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        found = [text[one.start() :][:3000] for one in re.finditer(r"Traceback \(most recent", text)]
        return [one for one in found if MADE not in one]


def engine_of(server: int) -> int | None:
    """The engine process of a server that runs now."""
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):  # a dead one that was not reaped has no command line
                process = Path(f"/proc/{child}")
                if b"foresay.server.engine_process.process" in (process / "cmdline").read_bytes():
                    return int(child)
    return None


def resident(process_id: int) -> float:
    """Memory of a process in MB, shared libraries included; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6
    except OSError:
        return 0.0


@contextmanager
def started(flags: list[str], log: Path) -> Iterator[tuple[int, int]]:
    """A server that is ready: the id of its process and its port. Its engines fail on demand."""
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).with_name("failing"))))
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    with log.open("ab") as errors:
        command = [*serving.FORESAY, *flags]
        with serving.started(command, "/ready", RETURN_SECONDS, errors, environment) as (process, port):
            yield process.pid, port
