"""What travels between the server and the engine process, MessagePack frames over a socket pair, and its two ends.

::

    server -> engine   Start (once), Add, Cancel, Finish, Number, KeepWarm, Ping, Stop
    engine -> server   Loading .. Ready | Failed, then Deltas (one per step), Rejected, Pong, Shadowed

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
from foresay.spec.trace import ShadowReport, StepTrace

HEADER_BYTES = 4


class Start(msgspec.Struct, tag="start"):
    """The first frame: which engine to build. beside: bytes that other engines of the server hold, by device, for which
    there must be room too. steps: of the engines before it, whose numbers it goes on with. costs: what the last of them
    measured."""

    config: EngineConfig
    beside: dict[str, int] = {}
    steps: int = 0
    costs: Costs = msgspec.field(default_factory=Costs)


class Add(msgspec.Struct, tag="add"):
    """Begin a request."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel"):
    """Nobody wants this request's tokens any more. No answer."""

    id: str


class Finish(msgspec.Struct, tag="finish"):
    """The text of this request ends after its output token number ``at_token``; its last delta still comes."""

    id: str
    at_token: int


class Number(msgspec.Struct, tag="number"):
    """So many steps were taken by the engines before, while this one got ready."""

    steps: int


class KeepWarm(msgspec.Struct, tag="keep_warm"):
    """Let the KV of this text be the last to make room, as if it had just been used. No answer."""

    tokens: list[int]
    salt: str


class Ping(msgspec.Struct, tag="ping"):
    """Say that you live; answered by :class:`Pong` between two steps."""


class Stop(msgspec.Struct, tag="stop"):
    """Leave now. What was running is dropped."""


class Loading(msgspec.Struct, tag="loading"):
    """The engine is being built: what is going on, and how much of it is done (0 to 1, None if nobody knows)."""

    phase: str
    share: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests. costs: what it measured, for the one after it. progress: a file that changes whenever
    a kernel ends; empty where kernels are a GPU's."""

    info: EngineInfo
    costs: Costs = msgspec.field(default_factory=Costs)
    progress: str = ""


class Failed(msgspec.Struct, tag="failed"):
    """The engine process is about to exit. building: it never got ready, and would not another time. usage: because
    settings are wrong. footprint: what it would hold, if all that is wrong is that there is no room for it beside the
    others. running: the requests that it may have died of; None if that may be any that it had."""

    message: str
    building: bool = False
    usage: bool = False
    footprint: Footprint | None = None
    running: list[str] | None = []

    @property
    def error(self) -> ForesayError:
        """The error."""
        return (ConfigurationError if self.usage else ForesayError)(self.message)


class Deltas(msgspec.Struct, tag="deltas"):
    """Everything one step emitted, and how it went; trace is None if there was no step (a request was only ended)."""

    deltas: list[Delta]
    trace: StepTrace | None = None


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine cannot serve this request. fault, code: of the error that it raised."""

    id: str
    fault: Fault
    code: str | None = None

    @property
    def error(self) -> InvalidRequest:
        """The error."""
        kind = ContextLengthExceeded if self.code == ContextLengthExceeded.code else InvalidRequest
        return kind(*self.fault)


class Pong(msgspec.Struct, tag="pong"):
    """The loop of the engine goes round."""


class Shadowed(msgspec.Struct, tag="shadowed"):
    """A request is over: what the shadow drafter would have done for it."""

    report: ShadowReport


UpFrame = Start | Add | Cancel | Finish | Number | KeepWarm | Ping | Stop
DownFrame = Loading | Ready | Failed | Deltas | Rejected | Pong | Shadowed

_encoder = msgspec.msgpack.Encoder()
_up_decoder = msgspec.msgpack.Decoder(UpFrame)
_down_decoder = msgspec.msgpack.Decoder(DownFrame)


def pack(frame: UpFrame | DownFrame) -> bytes:
    """The bytes of a frame, length included."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def unpack_up(body: bytes) -> UpFrame | Rejected:
    """A frame the engine process received; for one that cannot be understood, what to answer whoever sent it."""
    try:
        frame: UpFrame = _up_decoder.decode(body)
    except (ValueError, RecursionError) as error:
        return Rejected(_id_in(body), ((), f"the engine cannot read this request: {error}", ""))
    return frame


def _id_in(body: bytes) -> str:
    """Which request a frame is about; empty if it does not even say that."""
    with contextlib.suppress(ValueError, RecursionError):
        found = msgspec.msgpack.decode(body)
        request = found.get("request") if isinstance(found, dict) else None
        return str(request.get("id", "")) if isinstance(request, dict) else ""
    return ""


def unpack_down(body: bytes) -> DownFrame:
    """A frame the server received."""
    frame: DownFrame = _down_decoder.decode(body)
    return frame


class FrameSplitter:
    """Cuts a byte stream into frame bodies, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield the bodies that are complete now."""
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
    """Frames over the socket pair; ``closed`` is done when the engine's end is gone."""

    def __init__(self, receive: Callable[[DownFrame], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._splitter = FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's, which Ray has, are not its children

    def data_received(self, data: bytes) -> None:
        self._heard = True
        for body in self._splitter.feed(data):
            self._read(body)

    def _read(self, body: bytes) -> None:
        self._receive(unpack_down(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def heard(self) -> bool:
        """Whether anything came since this was asked last."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, frame: UpFrame | DownFrame) -> None:
        """Send a frame; into the void if the other end is gone."""
        if self._transport is not None:
            self._transport.write(pack(frame))

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
        self._splitter = FrameSplitter()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._poll = select.poll()  # select() knows no descriptor above 1023, and the server may have more
        for readable in (connection, self._alarm):
            self._poll.register(readable, select.POLLIN)

    def close(self) -> None:
        """Give back what it opened; the connection is the caller's."""
        self._alarm.close()
        self._bell.close()

    def send(self, frame: DownFrame) -> None:
        """Send one frame; waits if the server is behind with reading."""
        self._connection.sendall(pack(frame))

    def loading(self, phase: str, share: float | None = None) -> None:
        """Tell the server what is being loaded, and how much of it is there (0 to 1)."""
        self.send(Loading(phase, share))

    def wake(self) -> None:
        """End a :meth:`receive` that waits; may be called in another thread."""
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._bell.send(b"!")

    def receive(self, wait: bool) -> Iterator[UpFrame | Rejected]:
        """The frames that have arrived; with ``wait``, blocks until there are bytes or :meth:`wake` was called.

        EOFError if the server is gone.
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
