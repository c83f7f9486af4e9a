"""How events travel over a WebSocket (JSON in text frames, MessagePack in binary ones), and what waits to be written.

Putting never blocks: deltas of a response that find another one waiting are merged into it, so a slow reader gets fewer
and longer ones, and nothing but text piles up.

::

    put    A:delta "Once"   B:delta "The"   A:delta " upon"   A:done
    take   A:delta "Once upon"   B:delta "The"   A:done
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import WSMsgType
from msgspec import UNSET

from foresay.server.api.common.validation import named
from foresay.server.api.responses.events import ClientEvent, Envelope, ItemDelta
from foresay.server.schemas.bounds import MOST_DEPTH, MOST_PARTS, TOO_DEEP, weigh
from foresay.server.schemas.tokens import Provenance
from foresay.spec.errors import InvalidRequest

JSON_PROTOCOL = "foresay.v1.json"
MSGPACK_PROTOCOL = "foresay.v1.msgpack"
LONGEST_STREAM_ID = 256


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """One way of writing events. frame: the type of the frames, in both directions."""

    frame: WSMsgType
    encode: Callable[[Any], bytes]
    _check: Callable[[bytes], object]
    _client_event: Callable[[str | bytes], ClientEvent]
    _envelope: Callable[[str | bytes], Envelope]

    def decode(self, message: str | bytes) -> ClientEvent:
        """What the client says, once it is weighed; :class:`InvalidRequest` names the field."""
        try:
            event = self._client_event(message)
        except msgspec.ValidationError as error:
            wrong = named(error)
            raise wrong if wrong.param else InvalidRequest("", f"The message must be an object: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest("", f"The message cannot be read: {error}") from None
        if len(getattr(event, "stream_id", None) or "") > LONGEST_STREAM_ID:
            raise InvalidRequest("stream_id", f" must have at most {LONGEST_STREAM_ID} characters")
        return event

    def weigh(self, message: str | bytes) -> None:
        """Raise :class:`InvalidRequest` for what is too large to be read."""
        self._check(message.encode() if isinstance(message, str) else message)

    def stream_id(self, message: str | bytes) -> str | None:
        """The lane that a weighed message is about, as far as that can be told of a wrong one."""
        try:
            lane = self._envelope(message).stream_id
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return lane if isinstance(lane, str) and len(lane) <= LONGEST_STREAM_ID else None


# -- MessagePack before it is decoded: how much it holds, and nothing that JSON could not ------------------------------
# Extensions, binary and names that are no text would come out as values that nothing behind the decoder knows.


#: Bytes that follow the first one, by the first one: of numbers (and null, true, false).
_NUMBERS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
    first: 1 << first % 4 for first in (*range(0xCC, 0xD0), *range(0xD0, 0xD4))
}
#: Bytes of the length that follows, by the first byte.
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_OBJECTS = {0xDE: 2, 0xDF: 4}


def check_packed(message: bytes) -> None:
    """Raise :class:`InvalidRequest` for what is too much, too deep or no JSON; if it is cut off, the decoder does."""
    at = values = 0
    open_: list[list[int]] = []  # of each list or object around: values left, and whether they are names and values
    while at < len(message):
        values += 1
        if values > MOST_PARTS:
            raise InvalidRequest("", f"The message has too many values: at most {MOST_PARTS:,} are allowed")
        is_name = bool(open_ and open_[-1][1] and open_[-1][0] % 2 == 0)
        at, inside, is_text, of_pairs = _value(message, at)
        if is_name and not is_text:
            raise InvalidRequest("", "The message has a key that is not a string")
        if open_:
            open_[-1][0] -= 1
        if inside:
            open_.append([inside, of_pairs])
        if len(open_) > MOST_DEPTH:
            raise InvalidRequest("", f"The message is {TOO_DEEP}")
        while open_ and not open_[-1][0]:
            open_.pop()
        if not open_:
            return


def _value(message: bytes, at: int) -> tuple[int, int, bool, bool]:
    """Where the value at ``at`` ends or what is in it begins, how many values that is, whether it is text, or pairs."""
    first = message[at]
    if first < 0x80 or first >= 0xE0:
        return at + 1, 0, False, False
    if first < 0x90:
        return at + 1, 2 * (first & 15), False, True
    if first < 0xA0:
        return at + 1, first & 15, False, False
    if first < 0xC0:
        return at + 1 + (first & 31), 0, True, False
    if first in _NUMBERS:
        return at + 1 + _NUMBERS[first], 0, False, False
    for kinds, text, pairs in ((_TEXTS, True, False), (_LISTS, False, False), (_OBJECTS, False, True)):
        if first in kinds:
            behind = at + 1 + kinds[first]
            count = int.from_bytes(message[at + 1 : behind], "big")
            return (behind + count, 0, True, False) if text else (behind, count * (1 + pairs), False, pairs)
    raise InvalidRequest("", "The message holds binary data or an extension; only JSON's types are accepted")


# -- both ways ---------------------------------------------------------------------------------------------------------

_CODECS = {
    JSON_PROTOCOL: Codec(
        frame=WSMsgType.TEXT,
        encode=msgspec.json.Encoder().encode,
        _check=lambda message: weigh(message, what="The message"),
        _client_event=msgspec.json.Decoder(ClientEvent).decode,
        _envelope=msgspec.json.Decoder(Envelope).decode,
    ),
    MSGPACK_PROTOCOL: Codec(
        frame=WSMsgType.BINARY,
        encode=msgspec.msgpack.Encoder().encode,
        _check=check_packed,
        _client_event=msgspec.msgpack.Decoder(ClientEvent).decode,  # type: ignore[arg-type]  # gets bytes only
        _envelope=msgspec.msgpack.Decoder(Envelope).decode,  # type: ignore[arg-type]
    ),
}
PROTOCOLS = tuple(_CODECS)


def codec_of(protocol: str | None) -> Codec:
    """The codec of a sub-protocol; JSON where none was agreed on."""
    return _CODECS[protocol or JSON_PROTOCOL]


#: What a message counts besides its text.
MESSAGE_BYTES = 256


class _Merged:
    """Deltas of one part, waiting."""

    def __init__(self, event: ItemDelta) -> None:
        self.first, self.last = event, event
        self.texts = [event.delta]
        self.logprobs = list(getattr(event, "logprobs", ()))
        self.provenance = [event.provenance]

    def add(self, event: ItemDelta) -> None:
        self.last = event
        self.texts.append(event.delta)
        self.logprobs += getattr(event, "logprobs", ())
        self.provenance.append(event.provenance)

    def event(self) -> ItemDelta:
        """One delta that says it all, with the number of the last."""
        if self.last is self.first:
            return self.first
        changes: dict[str, Any] = {"delta": "".join(self.texts), "sequence_number": self.last.sequence_number}
        if self.logprobs:
            changes["logprobs"] = self.logprobs
        changes["provenance"] = Provenance.joined(self.provenance)
        return msgspec.structs.replace(self.first, **changes)


class SendQueue:
    """Messages of one socket in order. ``most``: bytes that may wait; :attr:`full` says when there are more."""

    def __init__(self, codec: Codec, most: int) -> None:
        self.bytes = 0
        self._codec, self._most = codec, most
        self._waiting: list[bytes | _Merged] = []
        self._tails: dict[str, _Merged] = {}  # the delta of each response that the next one may join
        self._filled, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()

    @property
    def full(self) -> bool:
        """Whether more waits than may."""
        return self.bytes > self._most

    def put(self, response_id: str, events: Sequence[msgspec.Struct]) -> None:
        """Add events of one response (or of none: "")."""
        for event in events:
            if isinstance(event, ItemDelta):
                self._put_delta(response_id, event)
            else:
                self._tails.pop(response_id, None)
                encoded = self._codec.encode(event)
                self._waiting.append(encoded)
                self.bytes += len(encoded) + MESSAGE_BYTES
        if self._waiting:
            self._empty.clear()
            self._filled.set()

    def _put_delta(self, response_id: str, event: ItemDelta) -> None:
        tail = self._tails.get(response_id)
        self.bytes += len(event.delta) + MESSAGE_BYTES * (len(getattr(event, "logprobs", ())) + _told(event))
        if tail is not None and _continues(tail.first, event):
            tail.add(event)
            return
        self._tails[response_id] = merged = _Merged(event)
        self._waiting.append(merged)
        self.bytes += MESSAGE_BYTES

    async def take(self) -> list[bytes]:
        """Everything that waits, as messages; waits for the first. Call :meth:`written` when they are out."""
        await self._filled.wait()
        self._filled.clear()
        waiting, self._waiting, self.bytes = self._waiting, [], 0
        self._tails.clear()
        return [one if isinstance(one, bytes) else self._codec.encode(one.event()) for one in waiting]

    def written(self) -> None:
        """What was taken last is out."""
        if not self._waiting:
            self._empty.set()

    async def flushed(self) -> None:
        """Wait until everything is out."""
        await self._empty.wait()


def _told(event: ItemDelta) -> int:
    """How many tokens and steps its provenance tells of."""
    return 0 if event.provenance is UNSET else len(event.provenance.tokens) + len(event.provenance.steps)


def _continues(first: ItemDelta, event: ItemDelta) -> bool:
    return type(first) is type(event) and first.item_id == event.item_id
