"""The OpenAPI document is valid, and says what the server does."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from aiohttp import hdrs, web
from schemathesis.specs.openapi.definitions import OPENAPI_31

from foresay.server.api.common.route import Route
from foresay.server.http.app import ROUTE_MODULES
from foresay.server.http.openapi import document, encoded
from foresay.server.schemas.shared import NOT_DONE
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.fields import settings_of
from foresay.server.settings.load import load
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.sampling import SamplingParams, ranges_of
from tests.server.scripted import ScriptedEngine, served

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = document(ROUTE_MODULES)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_the_module_prints_it() -> None:
    done = subprocess.run([sys.executable, "-m", "foresay.server.http.app"], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == encoded(ROUTE_MODULES)


async def test_the_server_serves_it(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        response = await client.get("/openapi.json")
        assert (response.status, response.content_type) == (200, "application/json")
        assert await response.json() == json.loads(encoded(ROUTE_MODULES))


def test_it_is_an_openapi_document() -> None:
    jsonschema.validate(json.loads(encoded(ROUTE_MODULES)), OPENAPI_31)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_reference_leads_somewhere() -> None:
    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from ([part["$ref"]] if isinstance(part.get("$ref"), str) else [])
            part = list(part.values())
        if isinstance(part, list):
            for one in part:
                yield from references(one)

    found = {reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)}
    assert found <= set(SCHEMAS)


#: Routes that OpenAPI has no words for: the WebSocket, which the description names, answers to browsers' questions, and
#: the dashboard's files and feed.
PAGE = {("GET", path) for path in ("/dashboard", "/dashboard/static/{name}", "/dashboard/feed")}
UNDOCUMENTED = {("GET", "/v1/responses"), ("GET", "/responses"), (hdrs.METH_OPTIONS, "/{tail}")} | PAGE


async def test_every_route_is_in_it(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        assert client.app is not None
        routes = client.app.router.routes()
        there = {
            (route.method, route.resource.canonical) for route in routes if route.resource and route.method != "HEAD"
        }
    documented = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    alike = {(method, path) for method, path in there if (method, f"/v1{path}") in documented} - documented
    assert there - UNDOCUMENTED - alike == documented
    assert "GET /v1/responses" in DOCUMENT["info"]["description"]


def test_every_route_says_what_it_is_for() -> None:
    for module in ROUTE_MODULES:
        for route in module.ROUTES:
            assert isinstance(route, Route | web.RouteDef)
            assert (route.handler.__doc__ or "").strip(), route.path


# -- limits ----------------------------------------------------------------------------------------------------------

TURN = {"role": "user", "content": "x"}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionRequest": ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
    "ChatRequest": ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 4}),
    "MessagesRequest": ("/v1/messages", {"model": "toy", "messages": [TURN], "max_tokens": 4}),
}
#: What else a request with a value needs.
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("ChatRequest", "top_logprobs"): {"logprobs": True},
    ("CompletionRequest", "max_tokens"): {"echo": True},
}


def beyond(field: dict[str, Any]) -> Iterator[Any]:
    """Values just outside the limits of a field."""
    for branch in field.get("anyOf", [field]):
        step = 1 if branch.get("type") == "integer" else 0.01
        for word, value in branch.items():
            match word:
                case "minimum":
                    yield value - step
                case "maximum":
                    yield value + step
                case "exclusiveMinimum":
                    yield value
                case "minLength":
                    yield "x" * (value - 1)
                case "minItems":
                    yield []
                case "maxItems":
                    yield [1 if branch["items"] == {"type": "integer"} else "x"] * (value + 1)
                case "maxLength":
                    yield "x" * (value + 1)
                case "pattern":
                    yield "two words"


def within(field: dict[str, Any]) -> Iterator[Any]:
    """Values at the limits of a field."""
    for branch in field.get("anyOf", [field]):
        for word, value in branch.items():
            if word in ("minimum", "maximum"):
                yield value


LIMITED = [
    (struct, name) for struct in ASKS for name, field in SCHEMAS[struct]["properties"].items() if [*beyond(field)]
]


@pytest.mark.parametrize(("struct", "name"), LIMITED)
async def test_limits_are_enforced_where_the_document_draws_them(tokenizer, struct, name):
    path, ask = ASKS[struct]
    ask = ask | WITH.get((struct, name), {})
    field = SCHEMAS[struct]["properties"][name]
    async with served(ScriptedEngine([5]), tokenizer) as client:
        for value in beyond(field):
            response = await client.post(path, json=ask | {name: value})
            body = await response.json()
            assert (response.status, body.get("error", {}).get("param")) == (400, name), (value, body)
        for value in within(field):
            response = await client.post(path, json=ask | {name: value})
            assert response.status == 200, (value, await response.text())


#: Untyped, and not refused: anything goes here, or it depends.
UNTYPED = {"repeat_last_n", "input", "stream_id"}


def test_what_is_refused_says_so() -> None:
    for name, schema in SCHEMAS.items():
        if name.endswith("Request"):
            free = {field for field, about in schema["properties"].items() if not about.keys() - {"default"}}
            assert free <= UNTYPED, name


@pytest.mark.parametrize("struct", ["ChatRequest", "CompletionRequest", "ResponseRequest"])
async def test_refused_fields_are_refused_where_the_document_says_so(tokenizer, struct):
    path, ask = (ASKS | {"ResponseRequest": ("/v1/responses", {"input": "x", "max_output_tokens": 4})})[struct]
    fields = SCHEMAS[struct]["properties"]
    refused = [name for name, field in fields.items() if field.get("description") == NOT_DONE]
    assert len(refused) > 10
    async with served(ScriptedEngine([5]), tokenizer) as client:
        for name in refused:
            response = await client.post(path, json=ask | {name: {"an": "object"}})
            assert response.status == 400
            assert (await response.json())["error"]["param"].partition(".")[0] == name
            for value in fields[name]["enum"]:
                response = await client.post(path, json=ask | {name: value})
                assert response.status == 200, (name, value, await response.text())


def test_one_range_bounds_requests_settings_and_the_engine() -> None:
    """Its owner is a type of spec/sampling.py: what disagrees has a range of its own."""
    ours, theirs = typing.get_type_hints(SamplingParams, include_extras=True), SCHEMAS["ChatRequest"]["properties"]
    settings = settings_of(SamplingConfig)
    shared = [name for name, kind in ours.items() if any(ranges_of(kind)) and name in settings]
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"} <= set(shared)
    for name in shared:
        (meta,) = ranges_of(ours[name])
        number = next(one for one in theirs[name]["anyOf"] if one["type"] != "null")
        bounds = {"minimum": meta.ge, "exclusiveMinimum": meta.gt, "maximum": meta.le}
        assert {word: number.get(word) for word in bounds} == bounds
        for value in beyond(number):
            with pytest.raises(ConfigurationError, match=name):
                load(SamplingConfig, {name: str(value)}, {}, given_as="argument")
            with pytest.raises(InvalidRequest, match=name):
                SamplingParams(**{name: value}).validate()
