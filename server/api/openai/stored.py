"""Stored chat completions (``store: true``): list, read, update, delete."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from foresay.server.api.common.kept import LIST_QUERY, Kept, Store, page, weight
from foresay.server.api.common.route import BODY_ERRORS, Route, json_response
from foresay.server.gateway.caller import CONTEXT
from foresay.server.host.models.models import MODELS
from foresay.server.schemas.bounds import check_metadata
from foresay.server.schemas.chat import ChatCompletion, ChatRequest, Message
from foresay.server.schemas.errors import ApiError


class StoredNotFound(ApiError):
    """No such chat completion is kept."""

    status, type, code, param = 404, "invalid_request_error", "not_found", "completion_id"


class StoredChat(Kept, kw_only=True, eq=False):
    """A chat completion and the messages that it answered. body_bytes: of the request."""

    completion: ChatCompletion
    messages: list[Message]
    body_bytes: int = 0

    @property
    def id(self) -> str:
        """The completion's id."""
        return self.completion.id

    def measured(self) -> int:
        """About how many bytes it holds."""
        return self.body_bytes + weight(self.completion)


class StoredChats(Store[StoredChat]):
    """The stored chat completions of one server, which are lost with it."""


class Changed(msgspec.Struct, kw_only=True):
    """``POST /v1/chat/completions/{id}``."""

    metadata: dict[str, str] | None = None


def keep(store: StoredChats, body: ChatRequest, completion: ChatCompletion) -> None:
    """Keep a completion for its caller."""
    completion.metadata = body.metadata or {}
    tenant, size = CONTEXT.get().caller.tenant, CONTEXT.get().body_bytes
    store.keep(StoredChat(tenant=tenant, completion=completion, messages=body.messages, body_bytes=size))


def _found(http: web.Request) -> StoredChat:
    id = http.match_info["completion_id"]
    found = http.app[MODELS].server.of(StoredChats).find(CONTEXT.get().caller.tenant, id)
    if found is None:
        raise StoredNotFound(f"Chat completion {id!r} not found: it was not stored, or was dropped to make room")
    return found


async def listed(http: web.Request) -> web.Response:
    """List the stored chat completions, the oldest first unless ``order`` is desc."""
    wanted = {name[9:-1]: value for name, value in http.query.items() if name.startswith("metadata[")}
    model = http.query.get("model")
    kept = sorted(
        http.app[MODELS].server.of(StoredChats).of(CONTEXT.get().caller.tenant), key=lambda one: one.completion.created
    )
    found = [
        one.completion
        for one in kept
        if model in (None, one.completion.model) and wanted.items() <= (one.completion.metadata or {}).items()
    ]
    return json_response({"object": "list"} | page(http, [(one.id, one) for one in found], "asc"))


async def retrieve(http: web.Request) -> web.Response:
    """Read a stored chat completion."""
    return json_response(_found(http).completion)


async def update(http: web.Request, body: Changed) -> web.Response:
    """Change the metadata of a stored chat completion."""
    found = _found(http)
    check_metadata(body.metadata)
    found.completion.metadata = body.metadata or {}
    return json_response(found.completion)


async def delete(http: web.Request) -> web.Response:
    """Delete a stored chat completion."""
    found = _found(http)
    http.app[MODELS].server.of(StoredChats).drop(found.tenant, found.id)
    return json_response({"id": found.id, "object": "chat.completion.deleted", "deleted": True})


async def messages(http: web.Request) -> web.Response:
    """List the messages of a stored chat completion."""
    found = _found(http)
    pairs = [(f"{found.id}-{index}", msgspec.to_builtins(one)) for index, one in enumerate(found.messages)]
    entries = [(id, {"id": id, **one, "content_parts": None}) for id, one in pairs]
    return json_response({"object": "list"} | page(http, entries, "asc"))


ID = (("completion_id", "the id of a chat completion"),)
#: Other paths, such as another server's ``/batch``, are not taken for ids.
_ONE, _ERRORS = "/v1/chat/completions/{completion_id:chatcmpl-[^/]+}", (400, 401, 404)
ROUTES = [
    Route("GET", "/v1/chat/completions", listed, answer=dict[str, Any], errors=(400, 401), query=LIST_QUERY),
    Route("GET", _ONE, retrieve, answer=ChatCompletion, errors=_ERRORS, parameters=ID),
    Route("POST", _ONE, update, Changed, ChatCompletion, errors=BODY_ERRORS, parameters=ID),
    Route("DELETE", _ONE, delete, answer=dict[str, Any], errors=_ERRORS, parameters=ID),
    Route("GET", f"{_ONE}/messages", messages, answer=dict[str, Any], errors=_ERRORS, parameters=ID, query=LIST_QUERY),
]
