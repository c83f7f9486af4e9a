"""Ray in a separate process: Ray kills its clients a minute after its head node is gone, but the server must live on.

::

    server ──open, addresses, deploy, close──> python -m foresay.server.replicas.cluster_process ──> Ray

It only reports addresses; streams do not pass through it. Each call has a connection of its own to a local socket, so
that one may take long. If the process dies it is restarted until Ray is back: live replicas are found again, and if
there are none they are redeployed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import struct
import sys
from subprocess import Popen
from typing import Any

import msgspec

from foresay.server.engine_process.child import die_with, reap, started
from foresay.server.engine_process.client_base import Progress
from foresay.server.engine_process.frames import Failed
from foresay.server.replicas.hosted import Address
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError

#: The cluster of that process: module and class.
RAY = "foresay.server.replicas.cluster:RayServe"
#: Pause between attempts to reach Ray again.
PAUSE_SECONDS = 1.0
log = logging.getLogger("foresay.server")


class Gone(ForesayError):
    """The process has ended, or there is none."""


class Returned(msgspec.Struct, frozen=True):
    """What a method returned, or why it failed."""

    found: list[Address] | int | None = None
    failed: Failed | None = None


class Question(msgspec.Struct, frozen=True):
    """A method of the cluster, and its argument."""

    name: str
    config: ServeConfig | None = None


class ClusterProcess:
    """A :class:`~foresay.server.replicas.fleet.Cluster` in a separate process. replicas: their number, or minimum
    and maximum. address: of a running Ray; None starts one on this machine, which ends with the server."""

    def __init__(self, replicas: str, address: str | None, made: str = RAY) -> None:
        self.process: Popen[bytes] | None = None
        self._arguments = (made, replicas, address or "")
        self._socket = ""  # where it listens
        self._config: ServeConfig | None = None
        self._known: list[Address] = []
        self._returning: asyncio.Task[None] | None = None

    async def open(self, config: ServeConfig, progress: Progress) -> None:
        """Start or join Ray, and deploy unless another server did."""
        self._config, address = config, self._arguments[-1]
        progress(f"joining Ray at {address}" if address else "starting Ray", None)
        await self._begin()
        progress("loading the replicas", None)

    async def _begin(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"")  # an abstract name that the kernel chooses
        listener.listen()
        self._socket = listener.getsockname().decode()
        self.process = started(__name__, listener, *self._arguments)
        await self._call("open", self._config)

    async def addresses(self) -> list[Address]:
        if self._returning is None or self._returning.done():
            try:
                self._known = await self._call("addresses")
            except Gone:
                log.error("Ray is gone: streams go on while their replicas live; trying to reach it again")
                self._returning = asyncio.create_task(self._return())
        return self._known

    async def _return(self) -> None:
        while True:
            await self._end()
            try:
                await self._begin()
                log.warning("Ray is back")
                return
            except ForesayError as error:
                log.warning("%s", error)
            await self._end()  # for lack of any other use
            await asyncio.sleep(PAUSE_SECONDS)

    async def deploy(self, config: ServeConfig) -> int:
        deployed = await self._call("deploy", config)
        self._config = config
        return int(deployed)

    async def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        await asyncio.gather(self._call("close"), return_exceptions=True)
        if self.process is not None:
            await asyncio.to_thread(reap, self.process)

    async def _call(self, name: str, config: ServeConfig | None = None) -> Any:
        """Call one of its methods; raises what that raises, or :class:`Gone`."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            with contextlib.closing(writer):
                writer.write(msgspec.msgpack.encode(Question(name, config)))
                writer.write_eof()
                body = await reader.read()
        except OSError:
            body = b""
        if not body:
            raise Gone("Ray ended the process that speaks to it")
        answer = msgspec.msgpack.decode(body, type=Returned)
        if answer.failed is not None:
            raise answer.failed.error
        return answer.found


# -- that process --------------------------------------------------------------------------------------------------


async def answer(listener: socket.socket, made: str, replicas: str, address: str) -> None:
    """Answer calls until closed, several at once."""
    module, _, name = made.partition(":")
    closed = asyncio.Event()
    cluster: Any = None
    try:
        cluster = getattr(importlib.import_module(module), name)(replicas, address or None)
    except ImportError as error:
        cluster = error

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _is_ours(writer.get_extra_info("socket")):
            question = msgspec.msgpack.decode(await reader.read(), type=Question)
            writer.write(msgspec.msgpack.encode(await _answered(cluster, question)))
            if question.name == "close":
                closed.set()
        writer.close()

    server = await asyncio.start_unix_server(one, sock=listener)
    await closed.wait()
    server.close()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the peer is a process of this user: any user may connect to an abstract name."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


async def _answered(cluster: Any, question: Question) -> Returned:
    try:
        if isinstance(cluster, ImportError):
            raise ConfigurationError(f"--replicas needs Ray Serve ({cluster}): pip install 'foresay[ray]'")
        given = [] if question.config is None else [question.config]
        return Returned(await getattr(cluster, question.name)(*given))
    except ForesayError as error:
        return Returned(failed=Failed(str(error), usage=isinstance(error, ConfigurationError)))
    except Exception as error:  # a bug, or one of Ray's
        log.exception("%s", question.name)
        return Returned(failed=Failed(f"Ray: {type(error).__name__}: {error}"))
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):  # Ray's handlers end the process; the server drains before that
            signal.signal(signum, signal.SIG_IGN)


def main(server: str, descriptor: str, *arguments: str) -> None:
    """Run until the server closes it or dies."""
    if die_with(int(server)):
        asyncio.run(answer(socket.socket(fileno=int(descriptor)), *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
