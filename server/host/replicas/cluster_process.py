"""Ray in a process of its own: Ray ends whatever speaks to its head a minute after that is gone, and a server lives on.

::

    server ──open, addresses, deploy, close──> python -m foresay.server.host.replicas.cluster_process ──> Ray

It only says where replicas are; streams do not pass through it. When it is gone it is started again until Ray is back:
replicas that live are found there, and where there are none they are deployed anew.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import socket
import sys
from itertools import count
from multiprocessing.connection import Connection
from subprocess import Popen
from typing import Any

from foresay.server.host.child import reap, started
from foresay.server.host.replacement import Progress
from foresay.server.host.replicas.hosted import Address
from foresay.server.host.spare import die_with
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError

#: The cluster of that process: module and class.
RAY = "foresay.server.host.replicas.cluster:RayServe"
#: How long to wait before Ray is looked for again.
PAUSE_SECONDS = 1.0
log = logging.getLogger("foresay.server")


class Gone(ForesayError):
    """The process has ended, or there is none."""


class ClusterProcess:
    """A :class:`~foresay.server.host.replicas.fleet.Cluster` in a process of its own. replicas: their number, or the
    least and the most. address: of a Ray that runs; None starts one on this machine, which ends with the server."""

    def __init__(self, replicas: str, address: str | None, made: str = RAY) -> None:
        self.process: Popen[bytes] | None = None
        self._arguments = (made, replicas, address or "")
        self._connection: Connection | None = None
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._config: ServeConfig | None = None
        self._known: list[Address] = []
        self._returning: asyncio.Task[None] | None = None

    async def open(self, config: ServeConfig, tell: Progress) -> None:
        """Start or join Ray, and deploy, unless somebody has."""
        self._config, address = config, self._arguments[-1]
        tell(f"joining Ray at {address}" if address else "starting Ray", None)
        await self._begin()
        tell("loading the replicas", None)

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = started(__name__, [theirs], str(theirs.fileno()), *self._arguments)
        self._connection = Connection(ours.detach())
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._answered)
        await self._ask("open", self._config)

    async def addresses(self) -> list[Address]:
        """The replicas that take requests; those known before, while Ray is gone."""
        if self._returning is not None and self._returning.done():
            self._returning = None
        if self._returning is None:
            try:
                self._known = await self._ask("addresses")
            except Gone:
                log.error("Ray is gone: streams go on while their replicas live; trying to reach it again")
                self._returning = asyncio.create_task(self._return())
        return self._known

    async def _return(self) -> None:
        while self._connection is None:
            await self._end()
            try:
                await self._begin()
                log.warning("Ray is back")
            except ForesayError as error:
                log.warning("%s", error)
                self._lost()
                await asyncio.sleep(PAUSE_SECONDS)

    async def deploy(self, config: ServeConfig, weights: bool) -> int:
        """A rolling update; if no replica of these settings gets ready, back to those before."""
        deployed = await self._ask("deploy", config, weights)
        self._config = config
        return int(deployed)

    async def close(self) -> None:
        """Leave Ray; one that was started here ends."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
        if self._connection is not None:
            await asyncio.gather(self._ask("close"), return_exceptions=True)
        await self._end()

    async def _ask(self, name: str, *arguments: object) -> Any:
        """What one of its methods returns; raises what that raises, or :class:`Gone`."""
        if self._connection is None:
            raise Gone("Ray is gone")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._connection.send((number, name, arguments))
        except OSError:
            self._lost()
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def _answered(self) -> None:
        assert self._connection is not None, "it is read"
        try:
            number, answer = self._connection.recv()
        except (EOFError, OSError):
            self._lost()
            return
        asked = self._answers.get(number)
        if asked is not None and not asked.done():
            asked.set_exception(answer) if isinstance(answer, Exception) else asked.set_result(answer)

    def _lost(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()
        for asked in self._answers.values():
            if not asked.done():
                asked.set_exception(Gone("Ray ended the process that speaks to it"))

    async def _end(self) -> None:
        self._lost()
        if self.process is not None:
            await asyncio.to_thread(reap, self.process)


# -- that process --------------------------------------------------------------------------------------------------


async def answer(connection: Connection, made: str, replicas: str, address: str) -> None:
    """Answer until the server is gone, several questions at once."""
    module, _, name = made.partition(":")
    asked: set[asyncio.Task[None]] = set()
    cluster: Any = None
    try:
        cluster = getattr(importlib.import_module(module), name)(replicas, address or None)
    except ImportError as error:
        cluster = error
    while True:
        try:
            question = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        task = asyncio.create_task(_answer_one(connection, cluster, *question))
        asked.add(task)
        task.add_done_callback(asked.discard)


async def _answer_one(connection: Connection, cluster: Any, number: int, name: str, arguments: tuple[Any, ...]) -> None:
    found: object
    try:
        if isinstance(cluster, ImportError):
            raise ConfigurationError(f"--replicas needs Ray Serve ({cluster}): pip install 'foresay[ray]'")
        found = await getattr(cluster, name)(*arguments)
    except ForesayError as error:
        found = error
    except Exception as error:  # a bug, or one of Ray's
        log.exception("%s", name)
        found = ForesayError(f"Ray: {type(error).__name__}: {error}")
    if name == "open":  # Ray's handlers end the process; the server drains first and then ends it
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
    connection.send((number, found))


def main(server: str, descriptor: str, *arguments: str) -> None:
    """Run until the server is done with it."""
    if die_with(int(server)):
        asyncio.run(answer(Connection(int(descriptor)), *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
