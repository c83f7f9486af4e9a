"""What travels between the server and the engine process, MessagePack frames over a socket pair, and its two ends.

::

    server -> engine   Start (once), Add, Cancel, Finish, Ping, Stop
    engine -> server   Loading .. Ready | Failed, then Deltas (one per step), Rejected, Pong

A frame is a four-byte big-endian length and that many bytes of MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import cast

import msgspec

from foresay.server.engine.costs import Costs
from foresay.server.settings.config import EngineConfig
from foresay.spec.errors import ConfigurationError, ContextLengthExceeded, Fault, ForesayError, InvalidRequest
from foresay.spec.request import Delta, EngineInfo, Footprint, Request
from foresay.spec.trace import StepTrace

HEADER_BYTES = 4


class Start(msgspec.Struct, tag="start"):
    """The first frame: which engine to build. reserved: bytes that the server's other engines hold, by device, and that
    must stay free for them. steps: of the previous engines; numbering continues from there. costs: measured by the last
    one."""

    config: EngineConfig
    reserved: dict[str, int] = {}
    steps: int = 0
    costs: Costs = msgspec.field(default_factory=Costs)


class Add(msgspec.Struct, tag="add"):
    """Start a request."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel"):
    """Drop this request. No answer."""

    id: str


class Finish(msgspec.Struct, tag="finish"):
    """The text of this request ends after its output token number ``at_token``; its last delta still comes."""

    id: str
    at_token: int


class Ping(msgspec.Struct, tag="ping"):
    """Liveness check; answered by :class:`Pong` between two steps."""


class Stop(msgspec.Struct, tag="stop"):
    """Exit now. Running requests are dropped."""


class Loading(msgspec.Struct, tag="loading"):
    """The engine is being built: the current phase, and the share done (0 to 1, None if unknown)."""

    phase: str
    share: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests. costs: what it measured, for the next one."""

    info: EngineInfo
    costs: Costs = msgspec.field(default_factory=Costs)


class Failed(msgspec.Struct, tag="failed"):
    """The engine process is about to exit. building: it never became ready, and a retry would not either. usage: the
    settings are wrong. footprint: what it would hold, if the only problem is memory that other engines hold. running:
    the requests that may have caused it; None if any of its requests may have."""

    message: str
    building: bool = False
    usage: bool = False
    footprint: Footprint | None = None
    running: list[str] | None = []

    @property
    def error(self) -> ForesayError:
        """The error to raise."""
        return (ConfigurationError if self.usage else ForesayError)(self.message)


class Deltas(msgspec.Struct, tag="deltas"):
    """Everything one step emitted, and its trace; None if there was no step (a request was only ended)."""

    deltas: list[Delta]
    trace: StepTrace | None = None


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine cannot serve this request. fault, code: of the error it raised."""

    id: str
    fault: Fault
    code: str | None = None

    @property
    def error(self) -> InvalidRequest:
        """The error."""
        kind = ContextLengthExceeded if self.code == ContextLengthExceeded.code else InvalidRequest
        return kind(*self.fault)


class Pong(msgspec.Struct, tag="pong"):
    """The engine's loop is running."""


UpFrame = Start | Add | Cancel | Finish | Ping | Stop
DownFrame = Loading | Ready | Failed | Deltas | Rejected | Pong

_encoder = msgspec.msgpack.Encoder()
_up_decoder = msgspec.msgpack.Decoder(UpFrame)
_down_decoder = msgspec.msgpack.Decoder(DownFrame)


def pack(frame: UpFrame | DownFrame) -> bytes:
    """The bytes of a frame, length included."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def unpack_up(body: bytes) -> UpFrame | Rejected:
    """Decode a frame that the engine process received; if that fails, the rejection to send back."""
    try:
        frame: UpFrame = _up_decoder.decode(body)
    except (ValueError, RecursionError) as error:
        return Rejected(_id_in(body), ((), f"the engine cannot read this request: {error}", ""))
    return frame


def _id_in(body: bytes) -> str:
    """The id of the request a frame is about; empty if it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        found = msgspec.msgpack.decode(body)
        request = found.get("request") if isinstance(found, dict) else None
        return str(request.get("id", "")) if isinstance(request, dict) else ""
    return ""


def unpack_down(body: bytes) -> DownFrame:
    """Decode a frame that the server received."""
    frame: DownFrame = _down_decoder.decode(body)
    return frame


class FrameSplitter:
    """Cuts a byte stream into frame bodies, however it is fragmented."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield the bodies that are now complete."""
        self._buffer += data
        begin = 0
        while len(self._buffer) >= begin + HEADER_BYTES:
            end = begin + HEADER_BYTES + int.from_bytes(self._buffer[begin : begin + HEADER_BYTES], "big")
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[begin + HEADER_BYTES : end])
            begin = end
        del self._buffer[:begin]


class Channel(asyncio.Protocol):
    """Frames over the socket pair; ``closed`` is done when the engine's end has closed."""

    def __init__(self, receive: Callable[[DownFrame], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._splitter = FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._has_received = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        for body in self._splitter.feed(data):
            self._read(body)

    def _read(self, body: bytes) -> None:
        self._receive(unpack_down(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def received(self) -> bool:
        """Whether anything arrived since the last call."""
        received, self._has_received = self._has_received, False
        return received

    def send(self, frame: UpFrame | DownFrame) -> None:
        """Send a frame; dropped if the other end is gone."""
        if self._transport is not None:
            self._transport.write(pack(frame))

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()


READ_BYTES = 1 << 18
#: What reading or writing raises when the server is gone.
GONE = (EOFError, BrokenPipeError, ConnectionResetError)


class Link:
    """Frames to and from the server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = FrameSplitter()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._poll = select.poll()  # select() cannot take descriptors above 1023
        for readable in (connection, self._alarm):
            self._poll.register(readable, select.POLLIN)

    def close(self) -> None:
        """Close what it opened; the connection is the caller's."""
        self._alarm.close()
        self._bell.close()

    def send(self, frame: DownFrame) -> None:
        """Send one frame; blocks while the server is slow to read."""
        self._connection.sendall(pack(frame))

    def loading(self, phase: str, share: float | None = None) -> None:
        """Report to the server what is being loaded, and the share done (0 to 1)."""
        self.send(Loading(phase, share))

    def wake(self) -> None:
        """Wake a waiting :meth:`receive`; may be called from another thread."""
        with contextlib.suppress(BlockingIOError):  # already rung
            self._bell.send(b"!")

    def receive(self, wait: bool) -> Iterator[UpFrame | Rejected]:
        """The frames that have arrived; with ``wait``, blocks until there are bytes or :meth:`wake` was called.

        Raises EOFError if the server is gone.
        """
        if wait:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._alarm.fileno() in ready:
                self._alarm.recv(READ_BYTES)
        data = self._read()
        for body in self._splitter.feed(data):
            yield unpack_up(body)

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError
        return data
