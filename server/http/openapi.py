"""``GET /openapi.json``: this API, described for programs.

It is made from the routes of the modules and the structs they read and write, whose types declare the ranges of fields.
Refused fields are enforced where fields are understood (:mod:`foresay.server.api.common.validation`).

``python -m foresay.server.http.app`` prints it (``make openapi``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web

import foresay
from foresay.server.api.common.route import BODY_ERRORS, PLAIN_ERRORS, ROUTE_MODULES, ErrorShape, Route, Stream
from foresay.server.schemas.shared import NOT_DONE, ErrorBody

Schema = dict[str, Any]


def refuse(schema: Schema) -> None:
    """Restrict known but unsupported fields to their harmless values."""
    for field in schema.get("properties", {}).values():
        if field.get("description") == NOT_DONE:
            field.pop("anyOf", None)


DESCRIPTION = """\
Large language models with speculative decoding: the same tokens, sooner.

Optional request fields accept null, which means their default. Fields that are not listed are ignored. Some listed
fields are known but not supported: only the values shown are allowed, and any other is refused with status 400 and the
field's name in `error.param`. Every response carries `X-Request-Id`, the client's own if it sent one.

`GET /v1/responses` with an `Upgrade: websocket` header speaks OpenAI's Responses API over a WebSocket. OpenAPI cannot
describe that; `docs/protocol.md` does.
"""

REASONS = {
    400: "The request is wrong; the error names the field.",
    401: "The server requires an API key, and the request has no valid one.",
    403: "A web page of this origin may not use the server.",
    404: "There is no model or object with this name.",
    408: "The body took too long to arrive.",
    409: "The state of what the request would change does not allow it.",
    413: "The body is larger than the server reads.",
    415: "The body is compressed, or is not JSON.",
    429: "Too many requests are running or waiting; Retry-After says when to try again.",
    500: "The engine gave up on the request.",
    503: "The model is loading, the engine is down, or the server is stopping; Retry-After says when to try again.",
    504: "The request took longer than the server allows.",
}
WAIT = {"Retry-After": {"description": "seconds", "schema": {"type": "string"}}}
DONE = "[DONE]"
REF = "#/components/schemas/{name}"


def document(modules: Sequence[ModuleType]) -> dict[str, Any]:
    """The whole document, as it becomes JSON."""
    routes = list(_routes(modules))
    types = list(dict.fromkeys(_types(route, shape) for route, _, shape in routes))
    flat = list(dict.fromkeys(one for several in types for one in several))
    schemas, components = msgspec.json.schema_components(flat, ref_template=REF)
    known = dict(zip(flat, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, tag, shape in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, tag, shape, known)
    for component in components.values():
        refuse(component)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foresay", "version": foresay.__version__, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "tags": [{"name": _tag(module), "description": _first_line(module)} for module in modules],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _routes(modules: Sequence[ModuleType]) -> Iterator[tuple[Route, str, ErrorShape | None]]:
    """Every route that OpenAPI can describe, with its module's tag and error shape."""
    for module in modules:
        for route in module.ROUTES:
            if isinstance(route, Route):
                yield route, _tag(module), getattr(module, "ERRORS", None)


def _types(route: Route, shape: ErrorShape | None) -> tuple[Any, ...]:
    chunks = route.stream.chunks if route.stream else ()
    error = ErrorBody if shape is None else shape.body
    return tuple(one for one in (route.body, route.answer, *chunks, error) if one is not None)


def _path(route: Route) -> str:
    """aiohttp's path with OpenAPI's variables: ``{name:.+}`` becomes ``{name}``."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


def _tag(module: ModuleType) -> str:
    """The last telling part of the module's name."""
    return module.__name__.removesuffix(".routes").rpartition(".")[2]


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _operation(route: Route, tag: str, shape: ErrorShape | None, known: dict[Any, Any]) -> dict[str, Any]:
    """What OpenAPI says about one method of one path."""
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{_path(route)}").rstrip("_"),
        "summary": _first_line(route.handler).rstrip("."),
        "tags": [tag],
        "responses": {"200": _success(route, known)} | _errors(route, shape, known),
    }
    parameters = [
        _parameter("path", name, "string", name.replace("_", " ")) for name in re.findall(r"{(\w+)}", _path(route))
    ]
    parameters += [_parameter("query", name, kind, about) for name, kind, about in route.query]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": known[route.body]}}}
    return operation


def _parameter(location: str, name: str, kind: str, about: str) -> dict[str, Any]:
    required = {"required": True} if location == "path" else {}
    return {"name": name, "in": location, "description": about, "schema": {"type": kind}} | required


def _success(route: Route, known: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is None and route.stream is None:
        content[route.media] = {"schema": {"type": "object" if route.media == "application/json" else "string"}}
    if route.answer is not None:
        content["application/json"] = {"schema": known[route.answer]}
    if route.stream is not None:
        kind = route.stream.framing.content_type.partition(";")[0]
        content[kind] = {"schema": _item(route.stream, known)}
    return {"description": "The answer."} | ({"content": content} if content else {})


def _item(stream: Stream, known: dict[Any, Any]) -> dict[str, Any]:
    """The schema of one item of a stream: a line, or the fields of an event."""
    chunk: dict[str, Any] = {"anyOf": [known[chunk] for chunk in stream.chunks]}
    if stream.framing.content_type.startswith("application/"):
        return chunk
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    if stream.framing.done:
        data = {"anyOf": [{"const": DONE}, data]}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def _errors(route: Route, shape: ErrorShape | None, known: dict[Any, Any]) -> dict[str, Any]:
    schema = known[ErrorBody if shape is None else shape.body]
    return {
        str(status): {"description": REASONS[status], "content": {"application/json": {"schema": schema}}}
        | ({"headers": WAIT} if status in (429, 503) else {})
        for status in (PLAIN_ERRORS if route.body is None else BODY_ERRORS)
    }


def encoded(modules: Sequence[ModuleType]) -> bytes:
    """The document as it is printed and served."""
    return msgspec.json.format(msgspec.json.encode(document(modules)), indent=2) + b"\n"


_encoded = lru_cache(maxsize=1)(encoded)


async def openapi(http: web.Request) -> web.Response:
    """This API as an OpenAPI document."""
    modules: tuple[ModuleType, ...] = http.app[ROUTE_MODULES]
    return web.Response(body=_encoded(modules), content_type="application/json")


ROUTES = [Route("GET", "/openapi.json", openapi)]
