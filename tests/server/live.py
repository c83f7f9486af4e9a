"""A real server in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import openai

from foresay.server.engine_process.client import EngineClient

START_SECONDS = 600.0
ROOT = Path(__file__).parents[2]


class LiveServer:
    """``foresay serve`` on a free port; killed at the end if it is still there. variables: of its environment.
    measures: its first engine is not given what steps and drafts cost."""

    def __init__(
        self, log: Path, *flags: str, variables: Mapping[str, str] | None = None, measures: bool = False
    ) -> None:
        self._log = log
        if "--draft" not in flags:
            flags = ("--draft", "bundled", "--draft-tokens", "4", *flags)
        module = "foresay.server.cli" if measures else "tests.server.known_costs"
        command = [sys.executable, "-m", module, "serve", "--port", "0", *flags]
        with log.open("wb") as errors:
            environment = {**os.environ, **(variables or {})}
            path = [environment.get("PYTHONPATH", ""), str(ROOT)]  # it may be started elsewhere
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def wait_for_url(self) -> str:
        """Wait for the banner; returns the address in it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"API +(http://\S+)/v1", self.output)
            if found:
                return found[1]
            assert self.process.poll() is None, self.output
            time.sleep(0.1)
        raise TimeoutError(self.output)

    @property
    def processor_seconds(self) -> float:
        """What it has computed so far, its engine not counted."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def processes(self) -> dict[int, str]:
        """Ids and names of the processes it has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {}
        for child in map(int, children):
            with contextlib.suppress(OSError):
                found[child] = Path(f"/proc/{child}/comm").read_text().strip()
        return found

    def engine_processes(self) -> list[int]:
        """Ids of the processes it has started."""
        return list(self.processes())

    def resident_bytes(self) -> int:
        """Memory of the server and of the processes it has started."""
        found = 0
        for process in (self.process.pid, *self.processes()):
            with contextlib.suppress(OSError):
                found += 1024 * int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
        return found

    def terminate(self) -> None:
        """What a service manager does first."""
        os.kill(self.process.pid, signal.SIGTERM)


def openai_client(url: str) -> openai.AsyncOpenAI:
    """The official client, set not to hide errors by trying again."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def send_signal(engine: EngineClient, number: signal.Signals) -> None:
    """To the engine's process, which is there: id 0 would be all processes of the tests."""
    assert engine.process_id is not None
    os.kill(engine.process_id, number)


async def status_of(url: str, path: str) -> int:
    """The HTTP status of a GET."""
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return response.status
