"""The engine process's end where several servers ask it: the one that started it, and front doors that come and go.

A front door speaks the frames that a server speaks (:mod:`foresay.server.host.frames`), on a connection that somebody
else has looked at (:mod:`foresay.server.host.replicas.admission`). It hears of its own requests, and of every step. Its
requests bear its number in here, so that two front doors may call theirs alike; they end with its connection. Nobody
waits for one that does not read: what it leaves is kept up to a bound, and then it is shown out.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterator

from msgspec.structs import replace

from foresay.server.host import frames
from foresay.server.host.frames import GONE, READ_BYTES, DownFrame, FrameSplitter, Link, UpFrame, pack
from foresay.server.host.replicas.admission import hang_up
from foresay.server.host.resumption import PROOF
from foresay.spec.request import Delta

#: Bytes that one may leave unread.
MOST_UNREAD = 1 << 24
#: How often, in seconds, the server that started the engine is told of a step: it only wants to know how busy it is.
NEWS_SECONDS = 0.25


class Door:
    """One connection. number: what its requests bear. running: deltas of those that run, by their names in here."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.running: dict[str, int] = {}
        self.unread = bytearray()
        self._splitter = FrameSplitter()

    def named(self, id: str) -> str:
        """What a request of this one is called in here."""
        return f"{self.number}/{id}"

    def put(self, frame: DownFrame) -> None:
        """Send a frame, or what of it can be sent now."""
        self.unread += pack(frame)
        self.flush()

    def flush(self) -> None:
        """Send what was left."""
        with contextlib.suppress(BlockingIOError, *GONE):  # whoever is gone is seen when it is read from
            while self.unread:
                del self.unread[: self.connection.send(self.unread, socket.MSG_DONTWAIT)]

    def read(self) -> Iterator[bytes]:
        """The frames that have arrived; one of GONE if it is gone, or has left too much unread."""
        if len(self.unread) > MOST_UNREAD:
            raise EOFError
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise EOFError
            yield from self._splitter.feed(data)


class Doors(Link):
    """A :class:`Link` to the server that started the engine, and to front doors. arrivals: where their connections are
    handed in, as descriptors."""

    def __init__(self, connection: socket.socket, arrivals: socket.socket) -> None:
        super().__init__(connection)
        self._own, self._arrivals = Door(0, connection), arrivals
        self._doors: dict[int, Door] = {}
        self._admitted = 0
        self._ready: frames.Ready | None = None
        self._news_at = 0.0
        arrivals.setblocking(False)  # the flags that recv_fds takes are not used by it
        self._poll.register(arrivals, select.POLLIN)

    def close(self) -> None:
        """Show everybody out."""
        for door in self._doors.values():
            hang_up(door.connection)
        self._arrivals.close()
        super().close()

    # -- up ------------------------------------------------------------------------------------------------------

    def receive(self, wait: bool) -> Iterator[UpFrame | frames.Rejected]:
        """As a link's; EOFError if the server that started the engine is gone."""
        yield from super().receive(wait)
        self._own.flush()
        if self._ready is not None:
            self._admit()
        for door in list(self._doors.values()):
            try:
                for body in door.read():
                    yield from self._asked(door, frames.unpack_up(body))
            except (*GONE, OSError):
                yield from self._show_out(door)
            else:
                self._listen(door)

    def _admit(self) -> None:
        """Whoever was handed in is told what runs."""
        with contextlib.suppress(BlockingIOError):
            _, descriptors, _, _ = socket.recv_fds(self._arrivals, 1, 1)
            for descriptor in descriptors:
                self._admitted += 1
                door = self._doors[self._admitted] = Door(self._admitted, socket.socket(fileno=descriptor))
                self._poll.register(door.connection, select.POLLIN)
                assert self._ready is not None, "nobody is let in before"
                door.put(self._ready)

    def _listen(self, door: Door) -> None:
        """Wake up for what it says, and for room where it has not read all."""
        door.flush()
        self._poll.modify(door.connection, select.POLLIN | (select.POLLOUT if door.unread else 0))

    def _show_out(self, door: Door) -> Iterator[UpFrame]:
        """Nobody wants what it asked for."""
        self._poll.unregister(door.connection)
        hang_up(door.connection)
        del self._doors[door.number]
        yield from map(frames.Cancel, list(door.running))

    def _asked(self, door: Door, frame: UpFrame | frames.Rejected) -> Iterator[UpFrame | frames.Rejected]:
        """The frame as the engine knows it; nothing where it is none of a front door's business."""
        match frame:
            case frames.Add(request):
                request.id = door.named(request.id)
                request.fork_of = None if request.fork_of is None else door.named(request.fork_of)
                door.running[request.id] = 0
                yield frame
            case frames.Cancel(id):
                door.running.pop(door.named(id), None)
                yield frames.Cancel(door.named(id))
            case frames.Finish(id, at_token):
                yield frames.Finish(door.named(id), at_token)
            case frames.Rejected():
                yield replace(frame, id=door.named(frame.id))
            case frames.KeepWarm():
                yield frame

    # -- down ----------------------------------------------------------------------------------------------------

    def send(self, frame: DownFrame) -> None:
        """Send a frame to whom it is for; waits for nobody."""
        match frame:
            case frames.Deltas():
                self._scatter(frame)
            case frames.Rejected(id):
                door, own = self._whose(id)
                door.put(replace(frame, id=own))
            case frames.Shadowed():
                for door in self._doors.values():
                    door.put(frame)
            case frames.Failed(running=running):
                self._tell_failure(frame, running or [])
            case _:
                self._ready = frame if isinstance(frame, frames.Ready) else self._ready
                self._own.put(frame)

    def _tell_failure(self, frame: frames.Failed, running: list[str]) -> None:
        """To each, which of its requests were in the step; none where that of another is as suspicious."""
        whose = [(id, *self._whose(id)) for id in running]
        suspects = {door.number for id, door, _ in whose if door.running.get(id, 0) < PROOF}
        for door in (self._own, *self._doors.values()):
            its_own = [own for _, one, own in whose if one is door and not suspects - {door.number}]
            door.put(replace(frame, running=its_own))

    def _whose(self, id: str) -> tuple[Door, str]:
        """Who asked for a request, and what it is called there."""
        number, _, own = id.partition("/")
        return self._doors.get(int(number) if number.isdigit() else 0, self._own), own

    def _scatter(self, frame: frames.Deltas) -> None:
        """To each what is its own, and how the step went."""
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in frame.deltas:
            door, own = self._whose(delta.id)
            deltas[door.number].append(replace(delta, id=own))
            if delta.id in door.running:
                door.running[delta.id] += 1
            if delta.finish_reason is not None:
                door.running.pop(delta.id, None)
        for number, door in self._doors.items():
            if frame.trace is not None or number in deltas:
                door.put(frames.Deltas(deltas[number], frame.trace))
        trace = frame.trace
        if trace is not None and len(self._own.unread) < MOST_UNREAD:
            over = not trace.running + trace.waiting
            if over or time.monotonic() > self._news_at + NEWS_SECONDS:
                self._news_at = time.monotonic()
                self._own.put(frames.Deltas([], trace))
