"""``GET /v1/responses`` upgraded: OpenAI's Responses API over a WebSocket. docs/protocol.md is its description.

::

    client ──messages──> read ──> lanes ──> turns ──events──> client
                           └── response.cancel ──> turns

A task reads, and one runs for each request; all end with the socket. A turn waits while the client does not read; what
the engine writes meanwhile is one longer delta then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import UNSET, UnsetType

from foresay.server.api.common.route import MOST_BYTES, error_body
from foresay.server.api.common.validation import named
from foresay.server.api.responses.answer import Cancelled
from foresay.server.api.responses.schemas import ResponseRequest
from foresay.server.api.responses.store import Responses
from foresay.server.api.responses.turn import ResponseTurn, prepared
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.models import Models
from foresay.server.models.service import Service
from foresay.server.schemas.bounds import weigh
from foresay.server.schemas.errors import ApiError, Busy, TooManyWaiting
from foresay.server.schemas.shared import ErrorDetail
from foresay.spec.errors import InvalidRequest

# -- messages ----------------------------------------------------------------------------------------------------------


class SocketError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """A message that could not be served. The socket stays open."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET


class Create(ResponseRequest, kw_only=True, tag_field="type", tag="response.create"):
    """Make a response: the fields of ``POST /v1/responses``.

    generate: false only computes the KV of the conversation, without output. stream_id: the lane; responses of one lane
    run one after the other, those of different lanes in parallel.
    """

    stream_id: str | None = None
    generate: bool | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """prewarm: the same as ``generate: false``."""

    prewarm: bool | None = None


class CancelResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="response.cancel"):
    """End a response early (our addition, spelled as in OpenAI's Realtime API): by its id, or all of a lane, or all."""

    response_id: str | None = None
    stream_id: str | None = None


class Envelope(msgspec.Struct, kw_only=True):
    """What can be read of an otherwise invalid message."""

    stream_id: Any = None


ClientEvent = Create | CancelResponse

#: The sub-protocol, for browsers that must name one.
PROTOCOL = "foresay.v1.json"
LONGEST_STREAM_ID = 256

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


# -- the socket --------------------------------------------------------------------------------------------------------


class LaneRequest:
    """A client's request for a response. Those of one lane run one after the other, those of different ones in
    parallel. lane: a lock held by the lane's running request. begun: it holds the lock; turn: the response that it
    runs, once prepared."""

    def __init__(self, create: Create, lane: asyncio.Lock) -> None:
        self.create, self.lane, self.begun = create, lane, False
        self.turn: ResponseTurn | None = None
        self.task: asyncio.Task[None] | None = None


#: How long a response's first event waits for the engine: refusals until then are errors, not failed responses.
FIRST_EVENT_SECONDS = 0.25
log = logging.getLogger("foresay.server")


class ConnectionLimit(Busy):
    """Too many sockets are open."""

    code = "websocket_connection_limit_reached"


class Closing(msgspec.Struct, frozen=True):
    """Why the server closes a connection."""

    code: int
    reason: str


DONE = Closing(WSCloseCode.OK, "idle")
RESTART = Closing(WSCloseCode.SERVICE_RESTART, "the server is shutting down")
TEXT_ONLY = Closing(WSCloseCode.UNSUPPORTED_DATA, "messages are JSON in text frames")
FULL = Closing(WSCloseCode.TRY_AGAIN_LATER, "too many connections")
SLOW = Closing(WSCloseCode.TRY_AGAIN_LATER, "the client reads too slowly")


class Socket:
    """One connection."""

    def __init__(self, models: Models, http: web.Request) -> None:
        self._models, self._http = models, http
        self._state, self._limits = models.server.of(Responses), models.server.of(Responses).socket_limits
        self._id, self._tenant = uuid.uuid4().hex, CONTEXT.get().caller.tenant
        self._requests: list[LaneRequest] = []  # that run or wait
        self._lanes: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self._writes = asyncio.Lock()
        self._closing: asyncio.Future[Closing] = asyncio.get_running_loop().create_future()
        self._draining = False
        self._used = time.monotonic()

    # -- life ----------------------------------------------------------------------------------------------------

    async def serve(self) -> web.WebSocketResponse:
        """From the handshake to the close."""
        limits = self._limits
        self._ws = ws = web.WebSocketResponse(
            heartbeat=limits.heartbeat,
            compress=False,
            max_msg_size=self._http[MOST_BYTES],
            protocols=_protocols(self._http),
            timeout=limits.closing,
            writer_limit=0,
        )
        await ws.prepare(self._http)
        self._models.server.on_drain.add(self.drain)
        reading = asyncio.create_task(self._read())
        with self._models.server.connections.connected():
            try:
                if len(self._models.server.on_drain) > limits.most:
                    await self._refuse(ConnectionLimit(f"{limits.most} WebSockets are open already"), None)
                    self.close(FULL)
                ends: list[asyncio.Future[Any]] = [reading, self._closing]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._models.server.on_drain.discard(self.drain)
                await self._end(reading)
        return ws

    async def _end(self, reading: asyncio.Task[None]) -> None:
        """Stop what runs, drop the responses that only this socket can find, and close it unless the client has
        left."""
        closing = self._closing.result() if self._closing.done() else Closing(WSCloseCode.INTERNAL_ERROR, "")
        reading.cancel()
        (failed,) = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(failed, Exception):
            log.error("a WebSocket failed", exc_info=failed)
        requests = list(self._requests)
        for request in requests:
            self._drop(request)
        await asyncio.gather(*(request.task for request in requests if request.task), return_exceptions=True)
        self._state.store.forget(self._tenant, self._id)
        transport = self._http.transport
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.closing):
                    await self._ws.close(code=closing.code, message=closing.reason.encode())
        finally:  # after a frame that was not read, to close is cancelled
            if transport is not None and transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(self._limits.closing, transport.abort)  # wait no longer for that

    def close(self, closing: Closing) -> None:
        """Close the connection; only the first call counts."""
        if not self._closing.done():
            self._closing.set_result(closing)

    def drain(self) -> None:
        """Take no more messages, finish running responses, then close."""
        self._draining = True
        self._idle()

    def _idle(self) -> None:
        self._used = time.monotonic()
        if self._draining and not self._requests:
            self.close(RESTART)

    # -- messages ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Receive messages, until nothing has come or run for long; nothing here waits for their answers, but a refusal
        waits for a slow reader."""
        while True:
            left = self._used + self._limits.idle - time.monotonic()
            if left <= 0 and not self._requests:
                return self.close(DONE)
            try:
                async with asyncio.timeout(max(left, self._limits.idle / 100)):
                    message = await self._ws.receive()
            except TimeoutError:
                continue
            self._used = time.monotonic()
            if message.type is WSMsgType.TEXT:
                await self._take(message.data)
                await asyncio.sleep(0)  # let other tasks run, however fast this client sends
            elif message.type is WSMsgType.BINARY:
                self.close(TEXT_ONLY)
                return
            else:
                return  # closed by the client, or by aiohttp after a bad message

    async def _take(self, data: Any) -> None:
        """Handle a client's message."""
        try:
            weigh(data.encode(), what="The message")
        except (ApiError, InvalidRequest) as error:
            await self._refuse(error, None)
            return
        try:
            match decoded(data):
                case Create() as create:
                    self._create(create)
                case CancelResponse() as cancel:
                    await self._cancel(cancel)
        except (ApiError, InvalidRequest) as error:
            await self._refuse(error, lane_of(data))

    def _create(self, create: Create) -> None:
        """Queue a request in its lane."""
        CONTEXT.get().caller.rate_limiter.enter()
        waiting = sum(not request.begun for request in self._requests)
        if waiting >= self._limits.waiting:
            raise TooManyWaiting(f"{waiting} messages of this connection are already waiting")
        request = LaneRequest(create, self._lanes.setdefault(create.stream_id, asyncio.Lock()))
        self._requests.append(request)
        request.task = asyncio.create_task(self._run(request))

    def _drop(self, request: LaneRequest) -> None:
        self._leave(request)
        if request.task is not None:
            request.task.cancel()

    def _leave(self, request: LaneRequest) -> None:
        if request in self._requests:
            self._requests.remove(request)
        if not self._requests:
            self._idle()

    async def _run(self, request: LaneRequest) -> None:
        try:
            async with request.lane:  # granted in order of arrival
                request.begun = True
                await self._answer(request)
        finally:
            self._leave(request)

    async def _cancel(self, cancel: CancelResponse) -> None:
        """End the response meant, if it runs; otherwise do nothing, since it may have just ended by itself."""
        for message in list(self._requests):
            if cancel.response_id is not None:
                if message.turn is not None and message.turn.record.response.id == cancel.response_id:
                    message.turn.cancel()
            elif cancel.stream_id in (None, message.create.stream_id):
                if message.turn is not None:
                    message.turn.cancel()
                else:
                    self._drop(message)
                    await self._refuse(Cancelled(), message.create.stream_id)

    async def _answer(self, message: LaneRequest) -> None:
        """Make the response that a message requests."""
        create = message.create
        try:
            async with self._models.lease(create.model) as service:
                await self._answered(service, message, create)
        except Exception as error:
            self._note_failure(create, error)
            await self._refuse(error, create.stream_id)

    async def _answered(self, service: Service, message: LaneRequest, create: Create) -> None:
        warms = create.prompt_cache_options is not None and create.prompt_cache_options.prewarm is True
        generates = create.generate is not False and not warms
        message.turn = turn = await prepared(service, create, self._id, create.stream_id, generates)
        async with turn.running() as generation:
            try:
                async for events in turn.batches(generation, FIRST_EVENT_SECONDS):
                    await self._send(*events)
            except Exception as error:
                if not turn.answer.begun or turn.answer.over:
                    raise
                self._note_failure(create, error)
                await self._send(turn.answer.broken(error_body(error)[1]))

    def _note_failure(self, create: Create, error: Exception) -> None:
        """Log an internal error, and drop the response that the failed one was to follow, if only this socket had it:
        the client restarts with all items."""
        if not isinstance(error, ApiError | InvalidRequest):
            log.exception("a response over a WebSocket failed (request %s)", CONTEXT.get().id)
        record = self._state.store.find(self._tenant, create.previous_response_id or "", self._id)
        if record is not None and record.socket_id and not isinstance(error, Cancelled):
            self._state.store.drop(self._tenant, record.response.id)

    # -- answers -------------------------------------------------------------------------------------------------

    async def _refuse(self, error: Exception, stream_id: str | None) -> None:
        status, body = error_body(error)
        lane = msgspec.UNSET if stream_id is None else stream_id
        await self._send(SocketError(status=status, error=body.error, stream_id=lane))

    async def _send(self, *events: msgspec.Struct) -> None:
        """Write events, each as JSON in a text frame, as fast as the client reads them."""
        with contextlib.suppress(ConnectionError):  # the client is gone, which ends the socket
            for event in events:
                try:
                    # One at a time: to cancel one that waits for the client cancels all that do.
                    async with asyncio.timeout(self._limits.stall), self._writes:
                        await self._ws.send_frame(msgspec.json.encode(event), WSMsgType.TEXT)
                except TimeoutError:
                    return self.close(SLOW)


def _protocols(http: web.Request) -> tuple[str, ...]:
    """The sub-protocol. Raises if the client offers only others, since browsers fail unless one is selected."""
    offered = [one.strip() for one in http.headers.get("Sec-WebSocket-Protocol", "").split(",") if one.strip()]
    if offered and PROTOCOL not in offered:
        raise InvalidRequest("Sec-WebSocket-Protocol", f"Offer the sub-protocol {PROTOCOL}, or none")
    return (PROTOCOL,)
