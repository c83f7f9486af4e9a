"""``/v1/responses``: create, read, cancel, delete; and the same over a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from foresay.server.api.common.route import BODY_ERRORS, Route, Stream, json_response, spellings
from foresay.server.api.common.streaming import leasing, stream
from foresay.server.api.responses import schemas
from foresay.server.api.responses.answer import CANCELLED
from foresay.server.api.responses.compact import compacted
from foresay.server.api.responses.events import FRAMING, ResponseEvent, StreamError
from foresay.server.api.responses.socket import Socket
from foresay.server.api.responses.store import Record, ResponseNotFound, Responses
from foresay.server.api.responses.turn import prepared, prompt_length, whole
from foresay.server.gateway.caller import CONTEXT
from foresay.server.host.models.models import MODELS
from foresay.server.host.service import Service
from foresay.server.schemas.shared import ErrorBody, ErrorDetail
from foresay.spec.errors import InvalidRequest

#: How long a cancel waits for the engine's last events.
CANCEL_SECONDS = 2.0
MOST_LISTED = 100
#: Query parameters of lists.
LIST_QUERY = (
    ("after", "string", "skip the items up to this one"),
    ("limit", "integer", f"at most this many items, up to {MOST_LISTED}"),
    ("order", "string", "asc or desc"),
)


def _broken(status: int, body: ErrorBody) -> StreamError:
    error = body.error
    return StreamError(code=error.code or error.type, message=error.message, param=error.param, error=error)


@leasing(FRAMING, _broken)
async def create(http: web.Request, service: Service, body: schemas.ResponseRequest) -> web.StreamResponse:
    """Answer a conversation given as items, or continue an earlier response."""
    turn = await prepared(service, body)
    if not body.stream:
        return json_response(await whole(turn))
    async with turn.running() as generation:
        return await stream(http, turn.answer, generation, service.ping_seconds)


async def count(http: web.Request, body: schemas.ResponseRequest) -> web.Response:
    """Count the tokens of a conversation without answering it."""
    async with http.app[MODELS].reading(body.model) as service:
        return json_response(schemas.InputTokens(await prompt_length(service, body)))


async def compact(http: web.Request, body: schemas.CompactRequest) -> web.Response:
    """Shorten a conversation to a window of items."""
    async with http.app[MODELS].reading(body.model) as service:
        answer, warnings = await compacted(service, body)
        service.warned.note(warnings)
    return json_response(answer)


async def retrieve(http: web.Request) -> web.Response:
    """Read a response."""
    if http.query.get("stream", "false").lower() != "false":
        raise InvalidRequest("stream", ": events are not kept; a response is read whole")
    return json_response(_found(http).response)


async def delete(http: web.Request) -> web.Response:
    """Delete a finished response."""
    record = _found(http)
    if record.response.status == "in_progress":
        raise InvalidRequest("response_id", "A running response cannot be deleted; cancel it first")
    http.app[MODELS].server.of(Responses).store.drop(record.tenant, record.response.id)
    return json_response(schemas.DeletedResponse(record.response.id))


async def cancel(http: web.Request) -> web.Response:
    """Cancel a running response; it keeps its output so far."""
    responses, record = http.app[MODELS].server.of(Responses), _found(http)
    running = responses.running.get((record.tenant, record.response.id))
    if running is not None:
        running.cancel()
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await record.over.wait()
        except TimeoutError:  # its sender is blocked by a slow client
            return json_response(msgspec.structs.replace(record.response, status=CANCELLED))
    elif record.response.status != CANCELLED:
        raise InvalidRequest("response_id", f"Cannot cancel a response that is {record.response.status}")
    return json_response(record.response)


async def input_items(http: web.Request) -> web.Response:
    """List the input items of a response, including those of the earlier conversation."""
    entries = [(item.id or "", item) for item in _found(http).items]
    return json_response(schemas.ItemList(**_page(http, entries)))


def _page(http: web.Request, entries: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A page of entries, each given with its id, for the query's ``order``, ``after`` and ``limit``, in the format of
    OpenAI's lists."""
    order, after = http.query.get("order", "desc"), http.query.get("after")
    limit = _limit(http.query.get("limit", "20"))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f" must be asc or desc, got {order!r}")
    entries = entries[::-1] if order == "desc" else entries
    if after is not None:
        positions = [index for index, (id, _) in enumerate(entries) if id == after]
        if not positions:
            raise InvalidRequest("after", f": there is no item {after!r}")
        entries = entries[positions[0] + 1 :]
    ids, data = [id for id, _ in entries[:limit]], [one for _, one in entries[:limit]]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(entries) > limit}


def _limit(given: str) -> int:
    """How many items a page may have."""
    if not given.isdecimal() or len(given) > len(str(MOST_LISTED)) or not 1 <= int(given) <= MOST_LISTED:
        raise InvalidRequest("limit", f" must be a number, between 1 and {MOST_LISTED}, got {given!r}")
    return int(given)


async def connect(http: web.Request) -> web.StreamResponse:
    """Open a WebSocket; see docs/protocol.md."""
    models = http.app[MODELS]
    if http.headers.get("Upgrade", "").lower().strip() != "websocket":
        detail = ErrorDetail("GET /v1/responses opens a WebSocket", "invalid_request_error", "Upgrade", None)
        return json_response(ErrorBody(detail), 426, {"Upgrade": "websocket"})
    models.check_open()
    return await Socket(models, http).serve()


def _found(http: web.Request) -> Record:
    """The response that the path names, if it is the caller's."""
    id = http.match_info["response_id"]
    record = http.app[MODELS].server.of(Responses).find(CONTEXT.get().caller.tenant, id)
    if record is None:
        raise ResponseNotFound(f"Response with id {id!r} not found: it was not stored, or was dropped to make room")
    return record


_ID = (("response_id", "the id of a response"),)
_READ = (400, 401, 404)
EVENTS = Stream(FRAMING, (ResponseEvent,))
_ALL, _ONE = "/v1/responses", "/v1/responses/{response_id}"
ROUTES = [
    Route("POST", _ALL, create, schemas.ResponseRequest, schemas.Response, EVENTS, (*BODY_ERRORS, 409)),
    Route("POST", f"{_ALL}/input_tokens", count, schemas.ResponseRequest, schemas.InputTokens),
    Route("POST", f"{_ALL}/compact", compact, schemas.CompactRequest, schemas.Compaction),
    Route("GET", _ONE, retrieve, None, schemas.Response, None, _READ, _ID),
    Route("DELETE", _ONE, delete, None, schemas.DeletedResponse, None, _READ, _ID),
    Route("POST", f"{_ONE}/cancel", cancel, None, schemas.Response, None, _READ, _ID),
    Route("GET", f"{_ONE}/input_items", input_items, None, schemas.ItemList, None, _READ, _ID, LIST_QUERY),
    *[web.get(path, connect, allow_head=False) for path in spellings(_ALL)],
]
