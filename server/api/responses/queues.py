"""The two queues of a WebSocket. A client's messages wait in lanes: responses of one lane run one after the other,
those of different lanes in parallel. Events, as JSON in text frames, wait in the send queue.

Putting never blocks: a delta is merged into a waiting one of the same response, so a slow reader gets fewer and longer
ones, and only text accumulates.

::

    put    A:delta "Once"   B:delta "The"   A:delta " upon"   A:done
    take   A:delta "Once upon"   B:delta "The"   A:done
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET

from foresay.server.api.common.validation import named
from foresay.server.api.responses.events import ClientEvent, Create, Envelope, ItemDelta
from foresay.server.api.responses.turn import ResponseTurn
from foresay.server.schemas.tokens import Provenance
from foresay.spec.errors import InvalidRequest


class LaneRequest:
    """A client's request. lane: a lock held by the lane's running request. begun: it holds the lock; turn: the response
    that it runs, once prepared."""

    def __init__(self, create: Create, size: int, lane: asyncio.Lock) -> None:
        self.create, self.size, self.lane = create, size, lane
        self.begun = self.cancelled = False
        self.turn: ResponseTurn | None = None
        self.task: asyncio.Task[None] | None = None

    def run(self, turn: ResponseTurn) -> ResponseTurn:
        """Set the turn that it runs."""
        self.turn = turn
        if self.cancelled:
            turn.cancel()
        return turn

    def cancel(self) -> None:
        """End its turn, now or once prepared."""
        self.cancelled = True
        if self.turn is not None:
            self.turn.cancel()


class Lanes:
    """All running or waiting messages of a socket, each with a task. answer: serves one. idle: called when all are
    done."""

    def __init__(self, answer: Callable[[LaneRequest], Awaitable[None]], idle: Callable[[], None]) -> None:
        self._answer, self._idle = answer, idle
        self._messages: list[LaneRequest] = []
        self._lanes: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()

    def __iter__(self) -> Iterator[LaneRequest]:
        return iter(list(self._messages))

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._messages)

    @property
    def waiting(self) -> int:
        """Number of messages that wait for their lane."""
        return sum(not message.begun for message in self._messages)

    def add(self, create: Create, size: int) -> None:
        """Queue a message of ``size`` bytes in its lane."""
        message = LaneRequest(create, size, self._lanes.setdefault(create.stream_id, asyncio.Lock()))
        self._messages.append(message)
        message.task = asyncio.create_task(self._run(message))

    def drop(self, message: LaneRequest) -> None:
        """Drop a waiting message."""
        self._leave(message)
        if message.task is not None:
            message.task.cancel()

    async def end(self) -> None:
        """Stop everything and wait until it has stopped."""
        messages = list(self)
        for message in messages:
            self.drop(message)
        await asyncio.gather(*(message.task for message in messages if message.task), return_exceptions=True)

    def _leave(self, message: LaneRequest) -> None:
        if message in self._messages:
            self._messages.remove(message)

    async def _run(self, message: LaneRequest) -> None:
        try:
            async with message.lane:  # granted in order of arrival
                message.begun = True
                await self._answer(message)
        finally:
            self._leave(message)
        if not self._messages:
            self._idle()


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
        wrong = named(error)
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
        if tail is not None and type(tail.first) is type(event) and tail.first.item_id == event.item_id:
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
