"""The two ends of the socket pair: the server's, and the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator

from server.host import frames


class Channel(asyncio.Protocol):
    """Frames over the socket pair; ``closed`` is done when the engine's end is gone. retired: it was closed because
    another engine goes on."""

    def __init__(self, receive: Callable[[frames.DownFrame], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._splitter = frames.FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._heard = self.retired = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard = True
        for body in self._splitter.feed(data):
            self._receive(frames.unpack_down(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def heard(self) -> bool:
        """Whether anything came since this was asked last."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, frame: frames.UpFrame) -> None:
        """Send a frame; into the void if the engine is gone."""
        if self._transport is not None:
            self._transport.write(frames.pack(frame))

    def hand_to(self, receive: Callable[[frames.DownFrame], None]) -> None:
        """Frames go to another from now on."""
        self._receive = receive

    def retire(self) -> None:
        """Another engine goes on: nothing that still comes of this one counts."""
        self.retired = True
        self.hand_to(lambda frame: None)
        self.send(frames.Stop())
        self.close()

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()


READ_BYTES = 1 << 18
#: What reading or writing raises when the server is not there any more.
GONE = (EOFError, BrokenPipeError, ConnectionResetError)


class Link:
    """Frames to and from the server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = frames.FrameSplitter()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._poll = select.poll()  # select() knows no descriptor above 1023, and the server may have more
        for readable in (connection, self._alarm):
            self._poll.register(readable, select.POLLIN)

    def close(self) -> None:
        """Give back what it opened; the connection is the caller's."""
        self._alarm.close()
        self._bell.close()

    def send(self, frame: frames.DownFrame) -> None:
        """Send one frame; waits if the server is behind with reading."""
        self._connection.sendall(frames.pack(frame))

    def loading(self, phase: str, share: float | None = None) -> None:
        """Tell the server what is being loaded, and how much of it is there (0 to 1)."""
        self.send(frames.Loading(phase, share))

    def wake(self) -> None:
        """End a :meth:`receive` that waits; may be called in another thread."""
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._bell.send(b"!")

    def receive(self, wait: bool) -> Iterator[frames.UpFrame | frames.Rejected]:
        """The frames that have arrived; with ``wait``, blocks until there are bytes or :meth:`wake` was called.

        EOFError if the server is gone.
        """
        if wait:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._alarm.fileno() in ready:
                self._alarm.recv(READ_BYTES)
        data = self._read()
        for body in self._splitter.feed(data):
            yield frames.unpack_up(body)

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError
        return data
