"""What stands in front of the routes: keys, error bodies, sizes, headers, the access log."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import OPEN_PATHS, AuthMiddleware, presented
from tests.gateway.guarded import ALICE, ASK, BOB, bearer, guarded
from tests.server.scripted import END, ScriptedEngine

SOCKET = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
AT = "/v1/responses"


@pytest.fixture
def auth() -> AuthMiddleware:
    return AuthMiddleware(KeyStore([ALICE, BOB]))


@pytest.fixture
def engine(tokenizer) -> ScriptedEngine:
    return ScriptedEngine([*tokenizer.encode("abc"), END])


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "path", "key"),
    [
        (bearer(ALICE), "/", ALICE),
        ({"Authorization": f"bearer  {ALICE} "}, "/", ALICE),
        ({"x-api-key": ALICE}, "/", ALICE),
        ({"Authorization": "Basic YTpi", "x-api-key": ALICE}, "/", ALICE),
        (bearer(ALICE) | {"x-api-key": BOB}, "/", ALICE),
        ({"Authorization": "Bearer "}, "/", None),
        ({"Authorization": ALICE}, "/", None),
        (bearer(ALICE), f"/?api_key={BOB}", ALICE),
        (SOCKET, f"{AT}?api_key={ALICE}", ALICE),
        (SOCKET, f"{AT}?api_key=", None),
        ({"Sec-WebSocket-Protocol": f"openai-insecure-api-key.{ALICE}"}, AT, None),
        (SOCKET | {"Sec-WebSocket-Protocol": f"realtime, openai-insecure-api-key.{ALICE}"}, AT, ALICE),
        (SOCKET | {"Sec-WebSocket-Protocol": f"realtime, openai-insecure-api-key.{ALICE}"}, "/v1/models", None),
        (SOCKET | {"Sec-WebSocket-Protocol": "realtime"}, AT, None),
        (SOCKET | bearer(ALICE), f"{AT}?api_key={BOB}", ALICE),
    ],
)
def test_where_a_key_may_stand(headers, path, key):
    assert presented(make_mocked_request("GET", path, headers)) == key


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models", SOCKET),
        ("GET", f"{AT}/resp_1", SOCKET),
        ("POST", AT, SOCKET),
        ("GET", AT, {}),
        ("GET", AT, {"Upgrade": "websocket"}),
        ("GET", AT, {"Upgrade": "websocket", "Connection": "Upgrade"}),
        ("POST", "/v1/completions", {"Upgrade": "websocket"}),
    ],
)
async def test_a_key_in_the_address_opens_the_handshake_of_a_websocket_only(
    tokenizer, engine, auth, method, path, headers, caplog
):
    with caplog.at_level(logging.DEBUG):
        async with guarded(engine, tokenizer, auth) as client:
            refused = await client.request(method, f"{path}?api_key={ALICE}", headers=headers)
            assert refused.status == 401
            message = (await refused.json())["error"]["message"]
            assert message.startswith("A key in the address opens WebSockets only") and "Bearer" in message
            async with client.ws_connect(f"{AT}?api_key={ALICE}"):
                pass
    assert ALICE not in caplog.text and engine.requests == []


async def test_who_says_twice_who_it_is_is_nobody(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        for name, scheme in (("Authorization", "Bearer "), ("x-api-key", "")):
            headers = CIMultiDict([(name, scheme + key) for key in (ALICE, BOB)])
            refused = await client.get("/v1/models", headers=headers)
            assert refused.status == 401 and f"Two {name} headers" in await refused.text()


async def test_what_is_expected_in_vain_is_refused_in_silence(tokenizer, engine, auth, caplog):
    async with guarded(engine, tokenizer, auth) as client:
        refused = await client.get("/v1/models", headers={"Expect": "200-maybe"})
        assert refused.status == 417 and len(refused.headers["X-Request-Id"]) == 32
    assert caplog.text == "", "a stranger cannot fill the log"


async def test_a_key_opens_the_server_and_says_whose_request_it_is(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        for headers in (bearer(ALICE), {"x-api-key": BOB}):
            assert (await client.post("/v1/completions", json=ASK, headers=headers)).status == 200
        salted = await client.post("/v1/completions", json=ASK | {"cache_salt": "own"}, headers=bearer(ALICE))
        assert salted.status == 200
    salts = [request.salt for request in engine.requests]
    assert len(set(salts)) == 3 and all(salts), "no prefix is shared between keys"


async def test_what_one_key_has_stored_is_not_there_for_another(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        made = await client.post("/v1/responses", json={"input": "Tell", "store": True}, headers=bearer(ALICE))
        path = f"/v1/responses/{(await made.json())['id']}"
        follow_up = {"input": "And then?", "previous_response_id": path.rpartition("/")[2]}
        for key, there in ((ALICE, True), (BOB, False)):
            for method, place in (("GET", path), ("GET", f"{path}/input_items")):
                assert (await client.request(method, place, headers=bearer(key))).status == (200 if there else 404)
            answer = await client.post("/v1/responses", json=follow_up, headers=bearer(key))
            assert answer.status == (200 if there else 400)
            assert there or "previous_response_not_found" in await answer.text()
        assert (await client.delete(path, headers=bearer(BOB))).status == 404
        assert (await client.delete(path, headers=bearer(ALICE))).status == 200


async def test_without_keys_everybody_may_ask_and_a_key_is_no_matter(tokenizer, engine):
    async with guarded(engine, tokenizer, AuthMiddleware()) as client:
        for headers in ({}, bearer("none")):
            assert (await client.post("/v1/completions", json=ASK, headers=headers)).status == 200
    assert {request.salt for request in engine.requests} == {""}


@pytest.mark.parametrize(
    ("headers", "message"), [({}, "No API key was sent"), (bearer(ALICE + "x"), "Incorrect API key")]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/server_info"),
        ("GET", "/nothing/here"),
        ("POST", "/health/../v1/completions"),
        ("GET", "/v1//health"),
        ("GET", "/v1/responses"),
        ("OPTIONS", "/v1/models"),
    ],
)
async def test_without_a_right_key_there_is_nothing_to_see(tokenizer, engine, auth, headers, message, method, path):
    async with guarded(engine, tokenizer, auth) as client:
        response = await client.request(method, path, json=ASK if method == "POST" else None, headers=headers)
        assert response.status == 401
        challenge = response.headers["WWW-Authenticate"]
        assert challenge.startswith('Bearer realm="foresay"')
        assert ("invalid_token" in challenge) == bool(headers)
        error = (await response.json())["error"]
        assert error["message"].startswith(message)
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert len(response.headers["X-Request-Id"]) == 32
    assert engine.requests == []


async def test_each_api_refuses_a_wrong_key_in_its_own_words(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        anthropic = await (await client.post("/v1/messages", json={})).json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
        ollama = await (await client.post("/api/chat", json={})).json()
        assert ollama["error"].startswith("No API key")


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_need_no_key(tokenizer, engine, auth, path):
    async with guarded(engine, tokenizer, auth) as client:
        for headers in ({}, bearer("wrong")):
            assert (await client.get(path, headers=headers)).status == 200


async def test_a_connection_that_carried_a_right_key_is_not_open_to_the_next_request(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=ASK, headers=bearer(ALICE))).status == 200
            assert (await client.post("/v1/completions", json=ASK)).status == 401


# -- sizes -------------------------------------------------------------------------------------------------------------


async def test_a_body_above_the_limit_is_refused_naming_it(tokenizer, engine):
    async with guarded(engine, tokenizer, AuthMiddleware(largest_body=2000)) as client:

        async def pieces():
            for _ in range(300):
                yield b" " * 10

        fits = await client.post("/v1/completions", json=ASK | {"prompt": "x" * 1500, "max_tokens": 1})
        assert (await fits.json())["error"]["code"] == "context_length_exceeded"
        for body in (b" " * 2001, pieces()):
            response = await client.post("/v1/completions", data=body)
            assert response.status == 413
            error = (await response.json())["error"]
            assert "2,000 bytes" in error["message"] and "max_body_bytes" in error["message"]
            assert error["code"] == "body_too_large"
    assert engine.requests == []


async def test_who_has_no_key_is_not_even_read(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        response = await client.post("/v1/completions", data=b" " * (1 << 20))
        assert response.status == 401


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ({"max_tokens": 8}, 8),
        ({"max_tokens": None}, 8),
        ({"max_tokens": 9}, "max_tokens: 9 tokens are more than this server allows; at most 8 are generated"),
        ({"max_tokens": 9, "min_tokens": 9}, "min_tokens must be at most 8 on this server, got 9"),
    ],
    ids=["allowed", "default", "clamped", "contradiction"],
)
async def test_output_is_capped(tokenizer, engine, asked, got):
    async with guarded(engine, tokenizer, AuthMiddleware(), max_output_tokens=8) as client:
        response = await client.post("/v1/completions", json=ASK | asked)
        answer = await response.json()
    if "error" in answer:
        assert (response.status, answer["error"]["message"]) == (400, got)
        assert answer["error"]["param"] == got.split()[0] and engine.requests == []
    else:
        warned = [one["message"] for one in answer.get("warnings") or ()]
        assert warned == ([got] if isinstance(got, str) else [])
        assert engine.requests[-1].params.max_tokens == 8


async def test_a_chat_without_max_tokens_gets_as_many_as_are_allowed_or_fit(tokenizer, engine):
    asked = {"messages": [{"role": "user", "content": "Tell"}]}
    async with guarded(engine, tokenizer, AuthMiddleware(), max_output_tokens=508) as client:
        assert (await client.post("/v1/chat/completions", json=asked)).status == 200
        both = await client.post("/v1/chat/completions", json=asked | {"max_completion_tokens": 509, "max_tokens": 1})
        (warning,) = (await both.json())["warnings"]
    request = engine.requests[0]
    assert request.params.max_tokens == 512 - len(request.prompt) < 508
    assert warning["param"] == "max_completion_tokens" and "more than the context leaves" in warning["message"]
    assert engine.requests[1].params.max_tokens == request.params.max_tokens


async def test_a_prompt_is_not_cut_for_output_that_is_not_allowed(tokenizer, engine):
    asked = {"prompt": [40] * 500, "truncate_prompt_tokens": -1, "max_tokens": 400}
    async with guarded(engine, tokenizer, AuthMiddleware(), max_output_tokens=8) as client:
        assert (await client.post("/v1/completions", json=asked)).status == 200
        assert (await client.get("/v1/models")).status == 200
    assert (len(engine.requests[0].prompt), engine.requests[0].params.max_tokens) == (500, 8)


# -- what responses say, and the log ----------------------------------------------------------------------------------


async def test_every_response_says_as_little_as_it_can_of_the_server(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        for path in ("/health", "/v1/models", "/nothing"):
            response = await client.get(path, headers=bearer(ALICE))
            assert response.headers["Server"] == "foresay"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert not any(name.lower().startswith(("access-control", "x-ratelimit")) for name in response.headers)


async def test_the_access_log_says_who_and_how_much_and_never_what(tokenizer, engine, auth, caplog):
    secret = "the prompt that nobody may read"
    headers = bearer(ALICE) | {"X-Request-Id": "r-17"}
    with caplog.at_level(logging.INFO, "foresay.access"):
        async with guarded(engine, tokenizer, auth) as client:
            await client.post("/v1/completions?api_key=leak", json={"prompt": secret, "max_tokens": 3}, headers=headers)
            await client.post("/v1/completions", json={"prompt": secret, "stream": True}, headers={"x-api-key": BOB})
            await client.get("/v1/models%0A200%0AFAKE", headers=bearer("wrong" + ALICE))
    first, second, third = [record.getMessage() for record in caplog.records if record.name == "foresay.access"]
    prompt = len(tokenizer.encode(secret))
    assert re.fullmatch(rf"POST /v1/completions 200 \d+ms in={prompt} out=3 key=key-1 id=r-17", first)
    assert re.fullmatch(rf"POST /v1/completions 200 \d+ms in={prompt} out=4 key=key-2 id=[0-9a-f]{{32}}", second)
    assert re.fullmatch(r"GET /v1/models%0A200%0AFAKE 401 \d+ms in=0 out=0 key=- id=[0-9a-f]{32}", third)
    for hidden in ("nobody", "leak", ALICE, BOB):
        assert hidden not in caplog.text


async def test_the_access_log_names_a_client_that_left_and_a_socket_that_closed(tokenizer, auth, caplog):
    engine = ScriptedEngine(tokenizer.encode("abc"), hold_after=20)
    with caplog.at_level(logging.INFO, "foresay.access"):
        async with guarded(engine, tokenizer, auth) as client:
            asked = ASK | {"max_tokens": 200, "stream": True}
            response = await client.post("/v1/completions", json=asked, headers=bearer(ALICE))
            await response.content.readline()
            response.close()
            async with client.ws_connect("/v1/responses", headers=bearer(BOB)) as socket:
                for text in ("one", "two"):
                    await socket.send_json({"type": "response.create", "input": text, "max_output_tokens": 16})
                    while "response.incomplete" not in await socket.receive_str():
                        pass
    left, closed = sorted(record.getMessage() for record in caplog.records if record.name == "foresay.access")[::-1]
    assert re.match(r"POST /v1/completions 499 \d+ms in=\d+ out=[1-9]\d* key=key-1 ", left)
    assert re.match(r"GET /v1/responses 101 \d+ms in=\d\d out=32 key=key-2 ", closed)


async def test_a_mistake_of_ours_names_the_request_in_the_log_and_to_the_client(tokenizer, engine, auth, caplog):
    class Broken(ScriptedEngine):
        def add(self, request, sink):
            raise RuntimeError("no such luck")

    async with guarded(Broken([END]), tokenizer, auth) as client:
        headers = bearer(ALICE) | {"X-Request-Id": "r-18"}
        response = await client.post("/v1/completions", json=ASK, headers=headers)
        assert response.status == 500
        assert "r-18" in (await response.json())["error"]["message"]
    assert "/v1/completions failed (request r-18)" in caplog.text
    assert ALICE not in caplog.text


@pytest.mark.parametrize(
    "lines",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret" + b"x" * 9000 + b"\r\n\r\n",
        b"GET /?api_key=sk-secret" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: sk-secret\r\n" % number for number in range(200)) + b"\r\n",
        b"sk-secret\r\n\r\n",
    ],
    ids=["control character", "long header", "long address", "many headers", "no HTTP"],
)
async def test_a_malformed_request_is_refused_and_its_key_is_not_logged(tokenizer, engine, auth, caplog, lines):
    async with guarded(engine, tokenizer, auth) as client:
        with caplog.at_level(logging.DEBUG):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(lines)
            assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.0 400")
            writer.close()
            await writer.wait_closed()
    assert "a malformed request from 127.0.0.1" in caplog.text
    assert "sk-secret" not in caplog.text
