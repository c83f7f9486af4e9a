"""Bodies that are no requests at all: every API answers 400 in its own shape, none falls over."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from foresay.server.api.common.route import Route
from foresay.server.http.app import ROUTE_MODULES
from foresay.server.http.auth import AuthMiddleware
from foresay.server.text.tokenizer import Tokenizer
from tests.gateway.guarded import guarded
from tests.routes.running import SentEngine
from tests.server.scripted import ScriptedEngine, served

POSTS = [
    route.path
    for module in ROUTE_MODULES
    for route in module.ROUTES
    if isinstance(route, Route) and route.body is not None
]
DEEP = 100_000
NOT_REQUESTS: dict[str, bytes] = {
    "nothing": b"",
    "a space": b" ",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "a text": b'"model"',
    "half an object": b'{"model": "toy", "messages": [',
    "two objects": b"{}{}",
    "no JSON": b"model=toy&prompt=x",
    "not a number": b'{"model": "toy", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "toy", "prompt": "x", "temperature": Infinity}',
    "a lone surrogate": b'{"model": "\\ud800", "prompt": "x"}',
    "broken UTF-8": b'{"model": "\xff\xfe", "prompt": "x"}',
    "broken UTF-8 in an unknown field": b'{"model": 1, "unknown": "\xf0\x9f"}',
    "a byte order mark": b'\xef\xbb\xbf{"model": "toy", "prompt": "x"}',
    "UTF-16": '{"model": "toy"}'.encode("utf-16"),
    "a control character": b'{"model": "\x00", "prompt": "x"}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "a deep field": b'{"model": "toy", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a deep unknown field": b'{"model": "toy", "unknown": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep tools": b'{"model": "toy", "tools": ' + b'[{"a":' * DEEP + b"1" + b"}]" * DEEP + b"}",
    "a name that is a number": b'{1: "x"}',
}


#: Of the server's administrator, whose requests are no better than others.
ADMIN_KEY = "an-admin-key-of-a-test"
SENT = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}


def opened(engine: ScriptedEngine, tokenizer: Tokenizer) -> AbstractAsyncContextManager[TestClient]:
    """A client of a server all of whose routes may be asked."""
    return guarded(engine, tokenizer, AuthMiddleware(admin_key=ADMIN_KEY))


async def answered(client, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    response = await client.post(path, data=body, headers=SENT | headers)
    return response.status, json.loads(await response.read())


def message_of(path: str, body: Any) -> str:
    """What an error says, in whichever shape."""
    output: str = body["error"] if path.startswith("/api/") else body["error"]["message"]
    return output


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_that_is_no_request_is_a_400(tokenizer, path):
    async with opened(ScriptedEngine([5]), tokenizer) as client:
        for name, body in NOT_REQUESTS.items():
            status, answer = await answered(client, path, body)
            assert status == 400, (name, status, answer)
            assert message_of(path, answer), name


@pytest.mark.parametrize("path", POSTS)
async def test_a_compressed_body_is_refused(tokenizer, path):
    async with opened(ScriptedEngine([5]), tokenizer) as client:
        for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity", "rot13"):
            status, answer = await answered(client, path, b'{"model": "toy"}', **{"Content-Encoding": encoding})
            assert status == 415
            assert "Content-Encoding" in message_of(path, answer)
        assert (await answered(client, path, b"[]", **{"Content-Encoding": "Identity"}))[0] == 400


HUGE = 10**400
ASK = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "field", ["max_tokens", "min_tokens", "top_k", "temperature", "top_p", "min_p", "n", "presence_penalty", "logprobs"]
)
@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, 2**64, 2**63, -(2**63) - 1], ids=["huge", "-huge", "64 bits", "63 bits", "-63 bits"]
)
async def test_numbers_beyond_any_machine_word(tokenizer, field, value):
    async with served(SentEngine([5]), tokenizer) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, answer = await answered(client, path, json.dumps(ASK | {"prompt": "x", field: value}).encode())
            assert status in (200, 400)
            assert status == 200 or answer["error"]["param"] in (field, "messages", "prompt"), answer


@pytest.mark.parametrize(
    "field", [b'"max_tokens": ', b'"seed": ', b'"temperature": ', b'"logit_bias": {"3": 1, "', b'"x": ']
)
async def test_numbers_of_thousands_of_digits(tokenizer, field):
    digits = b"9" * 5000 + (b'": 1}' if field.endswith(b'"') else b"")
    body = json.dumps(ASK).encode()[:-1] + b", " + field + digits + b"}"
    async with served(SentEngine([5]), tokenizer) as client:
        status, answer = await answered(client, "/v1/chat/completions", body)
        assert status in (200, 400), answer


@pytest.mark.parametrize("path", ["/nowhere", "/v1/messages/nowhere", "/api/nowhere"])
async def test_an_unknown_path_is_an_error_in_the_shape_of_its_api(tokenizer, path):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        status, answer = await answered(client, path, b"{}")
        assert (status, path in message_of(path, answer)) == (404, True)


@pytest.mark.parametrize("path", POSTS)
async def test_another_method_is_answered_with_the_allowed_ones(tokenizer, path):
    async with opened(ScriptedEngine([5]), tokenizer) as client:
        response = await client.put(path, data=b"{}", headers=SENT)
        assert response.status == 405
        assert "POST" in response.headers["Allow"]
        assert path in message_of(path, json.loads(await response.read()))


#: A field whose values are a few words, by API, and where it is in the body.
OF_A_FEW_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "x", "spec_decode_metrics": ...}, "spec_decode_metrics"),
    "/v1/chat/completions": (ASK | {"spec_decode_metrics": ...}, "spec_decode_metrics"),
    "/v1/messages": (ASK | {"max_tokens": 5, "messages": [{"role": ..., "content": "x"}]}, "messages[0].role"),
    "/v1/responses": ({"input": "x", "spec_decode_metrics": ...}, "spec_decode_metrics"),
}


@pytest.mark.parametrize("path", OF_A_FEW_WORDS)
@pytest.mark.parametrize(
    "value", ["a - at b", "x' - at `$.model`", "x - at `key` in `$`", "missing required field `model`", "\n - at `$.q"]
)
async def test_a_value_that_looks_like_a_complaint_does_not_rename_its_field(tokenizer, path, value):
    body, param = OF_A_FEW_WORDS[path]
    async with served(ScriptedEngine([5]), tokenizer) as client:
        status, answer = await answered(client, path, json.dumps(body, default=lambda _: value).encode())
        message = message_of(path, answer)
        assert status == 400
        assert message == f"{param}: invalid enum value {value!r}"
        assert answer["error"]["param"] == param
