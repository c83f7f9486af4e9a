"""How events travel over a WebSocket: JSON in text frames, or the same structs as MessagePack in binary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import WSMsgType

from server.api.common.validation import named
from server.api.responses.events import ClientEvent, Envelope
from server.api.responses.packed import check_packed
from server.schemas.bounds import weigh
from spec.errors import InvalidRequest

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
            wrong = named(str(error))
            raise wrong if wrong.param else InvalidRequest("", f"The message must be an object: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest("", f"The message cannot be read: {error}") from None
        if len(getattr(event, "stream_id", None) or "") > LONGEST_STREAM_ID:
            raise InvalidRequest("stream_id", f"stream_id must have at most {LONGEST_STREAM_ID} characters")
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
