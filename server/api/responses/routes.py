"""``/v1/responses``: create, read, cancel, delete, compact; and the same over a WebSocket.

``/v1/responses/compact`` shortens a conversation to a window of items. A client sends instead of it the user's messages
of the window, and a ``compaction`` that stands for the whole window. Nothing is summarized, since a small model's
summary could be silently wrong: what fits stays verbatim, and the rest is left out in this order, no more than
necessary, and the response's ``warnings`` say how much that was::

    reasoning before the last question             always: chat templates do not show it again
    tool results, and reasoning since              the oldest first; the model reads that a result is missing
    turns                                          the oldest first; the model reads how much is missing
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from foresay.server.api.common.route import Route, Stream, json_response, spellings
from foresay.server.api.common.streaming import stream
from foresay.server.api.common.turns import chat_prompt, leasing
from foresay.server.api.responses import schemas
from foresay.server.api.responses.answer import CANCELLED, FRAMING, ResponseEvent
from foresay.server.api.responses.items import ADDITIONAL, Toolbox, compaction_of, given_items, unfolded
from foresay.server.api.responses.request import NAMES, chat_request
from foresay.server.api.responses.socket import Socket
from foresay.server.api.responses.store import Record, ResponseNotFound, Responses
from foresay.server.api.responses.turn import given_now, prepared, prompt_length, whole
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.models import MODELS
from foresay.server.models.service import Service
from foresay.server.schemas.shared import ErrorBody, ErrorDetail
from foresay.server.text.prompt import Room
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest

# -- compacting --------------------------------------------------------------------------------------------------------

#: Share of the context for the window; the rest is for what follows.
SHARE = 0.5
MISSING_RESULT = "[This result was left out to make room.]"
MISSING_TURNS = "[{count} earlier items of this conversation were left out to make room.]"
#: Roles of items that always stay.
_RULES = ("system", "developer")


async def compacted(service: Service, body: schemas.CompactRequest) -> tuple[schemas.Compaction, tuple[Warned, ...]]:
    """The window that replaces a conversation, and warnings about what it lacks. Raises
    :class:`~foresay.spec.errors.ContextLengthExceeded` if even the last turn is too long."""
    _, earlier, given = given_now(service, body)
    items = [item for _, item in unfolded([((), item) for item in (*earlier, *given)])]
    if not items:
        raise InvalidRequest("input", " is required: there is nothing to compact")
    longest = service.opened()[1].max_model_len
    always, steps = _steps(items)
    low, high, length = always, len(steps), await _length(service, body, items)
    while low < high:  # in few attempts: each one renders and encodes the conversation
        middle = (low + high) // 2
        fits = await _length(service, body, window(items, steps[:middle])[0]) <= SHARE * longest
        low, high = (low, middle) if fits else (middle + 1, high)
    left, lacks = window(items, steps[:low])
    Room("input", longest).check(await _length(service, body, left), 1)
    usage = schemas.ResponseUsage(length, schemas.InputTokensDetails(0), 0, schemas.OutputTokensDetails(0), length)
    id, now = f"resp_{uuid.uuid4().hex}", int(time.time())
    plain = [item for item in left if item.role == "user" or item.type == ADDITIONAL]
    answer = schemas.Compaction(id=id, created_at=now, output=[*plain, compaction_of(left)], usage=usage)
    warnings = (warning("compacted", "input", **lacks),) if any(lacks.values()) else ()
    answer.warnings = [one.for_client for one in warnings] or UNSET
    return answer, warnings


async def _length(service: Service, body: schemas.CompactRequest, items: Sequence[schemas.InputItem]) -> int:
    """Number of tokens of the items' prompt."""
    request = schemas.ResponseRequest(instructions=body.instructions)
    with NAMES:
        return len(await chat_prompt(service, chat_request(request, (), items, Toolbox.of((), items, ()))))


def _steps(items: Sequence[schemas.InputItem]) -> tuple[int, list[int]]:
    """The number of items that are always left out, and the indices of all that can be, in order; the index of a user
    message means everything before it."""
    questions = [index for index, item in enumerate(items) if item.role == "user"]
    last = questions[-1] if questions else 0
    thoughts = [index for index, item in enumerate(items) if item.type == "reasoning"]
    results = [index for index, item in enumerate(items[:-1]) if _is_result(item)]
    always = [index for index in thoughts if index < last]
    others = sorted({*thoughts, *results} - {*always})
    return len(always), [*always, *others, *questions[1:]]


def window(
    items: Sequence[schemas.InputItem], left_out: Sequence[int]
) -> tuple[list[schemas.InputItem], dict[str, int]]:
    """The items without those at these indices, and counts of what was left out."""
    start = max((index for index in left_out if items[index].role == "user"), default=0)
    rules = [item for item in items[:start] if item.role in _RULES]
    lacks = {"results": 0, "thoughts": 0, "earlier": start - len(rules)}
    kept = []
    for index, item in enumerate(items[start:], start):
        if index in left_out and _is_result(item):
            lacks["results"] += 1
            item = replace(item, output=MISSING_RESULT)
        elif index in left_out and item.type == "reasoning":
            lacks["thoughts"] += 1
            continue
        kept.append(item)
    missing = schemas.InputItem(role="developer", content=MISSING_TURNS.format(count=lacks["earlier"]))
    return [*rules, *(given_items([missing]) if start else ()), *kept], lacks


def _is_result(item: schemas.InputItem) -> bool:
    return (item.type or "").endswith("_output")


# -- routes ------------------------------------------------------------------------------------------------------------

#: How long a cancel waits for the engine's last events.
CANCEL_SECONDS = 2.0
MOST_LISTED = 100
#: Query parameters of lists.
LIST_QUERY = (
    ("after", "string", "skip the items up to this one"),
    ("limit", "integer", f"at most this many items, up to {MOST_LISTED}"),
    ("order", "string", "asc or desc"),
)


def _broken(status: int, body: ErrorBody) -> ResponseEvent:
    error = body.error
    code = error.code or error.type
    return ResponseEvent(type="error", code=code, message=error.message, param=error.param, error=error)


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
    record = _found(http)
    if record.cancel is not None:
        record.cancel()
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
    items, limit = list(_found(http).items), http.query.get("limit", "20")
    order, after = http.query.get("order", "desc"), http.query.get("after")
    if not limit.isdecimal() or len(limit) > len(str(MOST_LISTED)) or not 1 <= int(limit) <= MOST_LISTED:
        raise InvalidRequest("limit", f" must be a number, between 1 and {MOST_LISTED}, got {limit!r}")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f" must be asc or desc, got {order!r}")
    items = items[::-1] if order == "desc" else items
    if after is not None:
        begin = next((index for index, item in enumerate(items, start=1) if item.id == after), None)
        if begin is None:
            raise InvalidRequest("after", f": there is no item {after!r}")
        items = items[begin:]
    page = items[: int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(schemas.ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > len(page)))


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


EVENTS = Stream(FRAMING, (ResponseEvent,))
_ALL, _ONE = "/v1/responses", "/v1/responses/{response_id}"
ROUTES = [
    Route("POST", _ALL, create, schemas.ResponseRequest, schemas.Response, EVENTS),
    Route("POST", f"{_ALL}/input_tokens", count, schemas.ResponseRequest, schemas.InputTokens),
    Route("POST", f"{_ALL}/compact", compact, schemas.CompactRequest, schemas.Compaction),
    Route("GET", _ONE, retrieve, answer=schemas.Response),
    Route("DELETE", _ONE, delete, answer=schemas.DeletedResponse),
    Route("POST", f"{_ONE}/cancel", cancel, answer=schemas.Response),
    Route("GET", f"{_ONE}/input_items", input_items, answer=schemas.ItemList, query=LIST_QUERY),
    *[web.get(path, connect, allow_head=False) for path in spellings(_ALL)],
]
