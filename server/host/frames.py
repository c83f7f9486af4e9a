"""What travels between the server and the engine process: MessagePack frames over a socket pair.

::

    server -> engine   Start (once), Add, Cancel, Finish, Number, KeepWarm, Inspect, Ping, Stop
    engine -> server   Loading .. Ready | Failed, then Deltas (one per step), Rejected, Inspected, Pong, Shadowed

A frame is a four-byte big-endian length and that many bytes of MessagePack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from server.settings.config import EngineConfig
from spec.request import Delta, EngineInfo, Footprint, Request
from spec.trace import ShadowReport, StepTrace

HEADER_BYTES = 4


class Start(msgspec.Struct, tag="start"):
    """The first frame: which engine to build. beside: bytes that other engines of the server hold, by device, for which
    there must be room too. steps: of the engines before it, whose numbers it goes on with."""

    config: EngineConfig
    beside: dict[str, int] = {}
    steps: int = 0


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


class Inspect(msgspec.Struct, tag="inspect"):
    """Check the page ledger; answered by :class:`Inspected` between two steps."""


class Ping(msgspec.Struct, tag="ping"):
    """Say that you live; answered by :class:`Pong` between two steps."""


class Stop(msgspec.Struct, tag="stop"):
    """Leave now. What was running is dropped."""


class Loading(msgspec.Struct, tag="loading"):
    """The engine is being built: what is going on, and how much of it is done (0 to 1, None if nobody knows)."""

    phase: str
    share: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed"):
    """The engine process is about to exit. building: it never got ready, and would not another time. usage: because
    settings are wrong. footprint: what it would hold, if all that is wrong is that there is no room for it beside the
    others. running: the requests in the step that failed."""

    message: str
    building: bool = False
    usage: bool = False
    footprint: Footprint | None = None
    running: list[str] = []


class Deltas(msgspec.Struct, tag="deltas"):
    """Everything one step emitted, and how it went; trace is None if there was no step (a request was only ended)."""

    deltas: list[Delta]
    trace: StepTrace | None = None


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine cannot serve this request: the arguments of the :class:`~spec.errors.InvalidRequest` it raised."""

    id: str
    param: str
    message: str
    code: str | None = None


class Inspected(msgspec.Struct, tag="inspected"):
    """The state between two steps. problem: what is wrong with the page ledger, None if it adds up."""

    problem: str | None
    busy: bool


class Pong(msgspec.Struct, tag="pong"):
    """The loop of the engine goes round."""


class Shadowed(msgspec.Struct, tag="shadowed"):
    """A request is over: what the shadow drafter would have done for it."""

    report: ShadowReport


UpFrame = Start | Add | Cancel | Finish | Number | KeepWarm | Inspect | Ping | Stop
DownFrame = Loading | Ready | Failed | Deltas | Rejected | Inspected | Pong | Shadowed

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
        return Rejected(_id_in(body), "", f"the engine cannot read this request: {error}")
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
