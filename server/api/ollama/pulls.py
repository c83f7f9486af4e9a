"""The models that clients have fetched: each by ``foresay pull`` in a process of its own, which ends with the last
client that waits for it. A thread could not be ended, and would be missing where chats are rendered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from foresay.server.schemas.errors import ModelNotFound

#: Most downloads at once, and the seconds that one has to remove what it began.
MOST, CLEAN_SECONDS = 2, 2.0


class Pull:
    """A model that is fetched, or waits for that. clients: those who wait for it. done: raises ModelNotFound if it
    cannot be fetched."""

    def __init__(self, name: str, slots: asyncio.Semaphore) -> None:
        self.name, self.clients, self.begun = name, 0, False
        self.done = asyncio.create_task(self._fetch(slots))

    @property
    def status(self) -> str:
        """What is going on, in a few words."""
        return f"pulling {self.name}" if self.begun else f"waiting for {MOST} other models that are pulled"

    async def _fetch(self, slots: asyncio.Semaphore) -> None:
        words = [sys.executable, "-P", "-m", "foresay.server.cli.main", "pull", self.name]
        environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        async with slots:
            self.begun = True
            process = await asyncio.create_subprocess_exec(
                *words, env=environment, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
            )
            try:
                said = (await process.communicate())[1].decode(errors="replace").strip()
            finally:
                await _end(process)
        if process.returncode:
            last = said.rpartition("\n")[2].removeprefix("foresay pull: ").removeprefix("NAME ")
            raise ModelNotFound(last or f"{self.name}: the download ended with status {process.returncode}")


async def _end(process: Process) -> None:
    """End a process that still runs, with its own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, TimeoutError):
            if process.returncode is None:
                os.killpg(process.pid, number)
            async with asyncio.timeout(CLEAN_SECONDS):
                await process.wait()


class Pulls:
    """All of them, by name."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MOST)
        self._running: dict[str, Pull] = {}

    def __len__(self) -> int:
        return len(self._running)

    @asynccontextmanager
    async def fetching(self, name: str) -> AsyncIterator[Pull]:
        """Have a model fetched, if it is not already; without a client that waits it is not."""
        pull = self._running.get(name) or self._running.setdefault(name, Pull(name, self._slots))
        pull.clients += 1
        try:
            yield pull
        finally:
            pull.clients -= 1
            if not pull.clients:
                del self._running[name]
                pull.done.cancel()
                await asyncio.gather(pull.done, return_exceptions=True)  # nobody else asks how it ended
