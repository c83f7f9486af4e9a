"""Messages over a WebSocket, as JSON in text frames, and the queue of those to be sent.

Putting never blocks: a delta is merged into a waiting one of the same response, so a slow reader gets fewer and longer
ones, and only text accumulates.

::

    put    A:delta "Once"   B:delta "The"   A:delta " upon"   A:done
    take   A:delta "Once upon"   B:delta "The"   A:done
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from foresay.server.api.common.validation import named
from foresay.server.api.responses.events import ClientEvent, Create, Envelope, ItemDelta
from foresay.server.schemas.tokens import Provenance
from foresay.spec.errors import InvalidRequest

#: The sub-protocol, for browsers that must name one.
PROTOCOL = "foresay.v1.json"
LONGEST_STREAM_ID = 256

_encode = msgspec.json.Encoder().encode
_client_event: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_envelope = msgspec.json.Decoder(Envelope)


def decoded(message: str) -> ClientEvent:
    """A client's message, decoded after its size check. Raises :class:`InvalidRequest` naming the field."""
    try:
        event = _client_event.decode(message)
    except msgspec.ValidationError as error:
        wrong = named(error, Create, lambda: msgspec.json.decode(message))
        raise wrong if wrong.param else InvalidRequest("", f"The message must be an object: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("", f"The message cannot be read: {error}") from None
    if len(getattr(event, "stream_id", None) or "") > LONGEST_STREAM_ID:
        raise InvalidRequest("stream_id", f" must have at most {LONGEST_STREAM_ID} characters")
    return event


def lane_of(message: str) -> str | None:
    """The lane of a message after its size check; None if it has none, or is too malformed."""
    try:
        lane = _envelope.decode(message).stream_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return lane if isinstance(lane, str) and len(lane) <= LONGEST_STREAM_ID else None


#: Bytes counted for a message in addition to its text.
MESSAGE_BYTES = 256


class _Merged:
    """Waiting deltas of one part, merged."""

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
        """One delta with all of them, with the number of the last."""
        if self.last is self.first:
            return self.first
        changes: dict[str, Any] = {"delta": "".join(self.texts), "sequence_number": self.last.sequence_number}
        if self.logprobs:
            changes["logprobs"] = self.logprobs
        changes["provenance"] = Provenance.joined(self.provenance)
        return msgspec.structs.replace(self.first, **changes)


class SendQueue:
    """The messages of one socket, in order. ``most``: bytes that may wait; :attr:`full` is true beyond that."""

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self._most = most
        self._waiting: list[bytes | _Merged] = []
        self._tails: dict[str, _Merged] = {}  # by response: the delta that the next may be merged into
        self._filled, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()

    @property
    def full(self) -> bool:
        """Whether too much is waiting."""
        return self.bytes > self._most

    def put(self, response_id: str, events: Sequence[msgspec.Struct]) -> None:
        """Add events of one response (or of none: "")."""
        for event in events:
            if isinstance(event, ItemDelta):
                self._put_delta(response_id, event)
            else:
                self._tails.pop(response_id, None)
                encoded = _encode(event)
                self._waiting.append(encoded)
                self.bytes += len(encoded) + MESSAGE_BYTES
        if self._waiting:
            self._empty.clear()
            self._filled.set()

    def _put_delta(self, response_id: str, event: ItemDelta) -> None:
        tail = self._tails.get(response_id)
        self.bytes += len(event.delta) + MESSAGE_BYTES * (len(getattr(event, "logprobs", ())) + _provenance_size(event))
        if tail is not None and _continues(tail.first, event):
            tail.add(event)
            return
        self._tails[response_id] = merged = _Merged(event)
        self._waiting.append(merged)
        self.bytes += MESSAGE_BYTES

    async def take(self) -> list[bytes]:
        """Everything that waits, as messages; blocks until there is one. Call :meth:`written` when they are sent."""
        await self._filled.wait()
        self._filled.clear()
        waiting, self._waiting, self.bytes = self._waiting, [], 0
        self._tails.clear()
        return [one if isinstance(one, bytes) else _encode(one.event()) for one in waiting]

    def written(self) -> None:
        """The messages taken last were sent."""
        if not self._waiting:
            self._empty.set()

    async def flushed(self) -> None:
        """Wait until everything was sent."""
        await self._empty.wait()


def _provenance_size(event: ItemDelta) -> int:
    """The number of tokens and steps in its provenance."""
    return 0 if event.provenance is UNSET else len(event.provenance.tokens) + len(event.provenance.steps)


def _continues(first: ItemDelta, event: ItemDelta) -> bool:
    return type(first) is type(event) and first.item_id == event.item_id
