"""An engine process that gets ready beside the one that serves, so that this one can be replaced on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from foresay.server.host import frames
from foresay.server.host.child import Process, Spawned, Watchdog, cpu_ticks, reap, stopped
from foresay.server.host.frames import Channel
from foresay.server.host.models.resident import NoPlace
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError

#: Told of what is going on, and how much of it is done where that is known.
Progress = Callable[[str, float | None], None]


def writes_alone(config: ServeConfig) -> bool:
    """Whether an engine of these settings writes a file that no other may write at the same time."""
    return config.trace is not None or config.draft_history is not None


class Standby(NamedTuple):
    """An engine process that is ready, and that nobody asks yet."""

    process: Process
    channel: Channel
    ready: frames.Ready

    async def end(self) -> None:
        """Nobody will ask it."""
        await _ended(self.process, self.channel)


async def make_ready(spawned: Spawned, start: frames.Start, timeout: float, tell: Progress) -> Standby:
    """Have a process that was started build an engine and get ready. timeout: see :func:`until_hung`.

    Raises :class:`NoPlace` if it would fit but for the one that serves, and what else keeps it from getting ready.
    """
    process, ours = spawned
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[frames.Ready] = loop.create_future()

    def receive(frame: frames.DownFrame) -> None:
        match frame:
            case frames.Loading(phase, share):
                tell(phase, share)
            case frames.Ready():
                ready.set_result(frame)
            case frames.Failed():
                ready.set_exception(refusal(frame))

    _, channel = await loop.create_unix_connection(lambda: Channel(receive), sock=ours)
    channel.send(start)
    watching = asyncio.create_task(until_hung(process.pid, channel, timeout, lambda: True))
    try:
        either: set[asyncio.Future[Any]] = {ready, channel.closed, watching}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise EngineFailed(watching.result() if watching.done() else "the new engine process died while it loaded")
        return Standby(process, channel, ready.result())
    except BaseException:
        await _ended(process, channel)
        raise
    finally:
        watching.cancel()


async def _ended(process: Process, channel: Channel) -> None:
    channel.close()
    process.kill()
    await asyncio.shield(asyncio.to_thread(reap, process))


def refusal(failed: frames.Failed) -> ForesayError:
    """Why an engine could not be built."""
    if failed.footprint is not None:
        return NoPlace(failed.message)
    return (ConfigurationError if failed.usage else ForesayError)(failed.message)


async def until_hung(process_id: int, channel: Channel, timeout: float, loading: Callable[[], bool]) -> str:
    """Watch a process; returns what is wrong with it. timeout: seconds that it may show no sign of life."""
    watchdog = Watchdog(timeout)
    while True:
        await asyncio.sleep(watchdog.interval)
        wrong = watchdog.look(channel.heard(), cpu_ticks(process_id), loading(), stopped(process_id, by="T"))
        if wrong is not None:
            return wrong
        if not loading():
            channel.send(frames.Ping())
