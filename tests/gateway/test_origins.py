"""Web pages of other origins: let in where configured, otherwise shut out, over HTTP and WebSocket alike."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest

from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import ANY_NAME_PATHS, AuthMiddleware, Origins
from foresay.server.settings.config import ServeConfig
from tests.gateway.guarded import ALICE, ASK, bearer, guarded
from tests.server.scripted import END, ScriptedEngine

PAGE = "https://chat.example.com"


def let_in(*origins: str, **more) -> AuthMiddleware:
    return AuthMiddleware(origins=Origins(origins, **more))


@pytest.fixture
def engine(tokenizer) -> ScriptedEngine:
    return ScriptedEngine([*tokenizer.encode("abc"), END])


def preflight(origin: str, **more: str) -> dict[str, str]:
    return {"Origin": origin, "Access-Control-Request-Method": "POST"} | more


async def test_no_page_is_let_in_by_default(tokenizer, engine):
    async with guarded(engine, tokenizer, AuthMiddleware()) as client:
        for origin in (PAGE, "null", "http://127.0.0.1:1", "http://localhost", "file://", "garbage", ""):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/health")):
                response = await client.request(method, path, headers={"Origin": origin}, data=b'{"prompt":"x"}')
                assert response.status == 403, (origin, path)
                assert (await response.json())["error"]["code"] == "origin_not_allowed"
                assert not any(name.startswith("Access-Control") for name in response.headers)
            requested = await client.options("/v1/completions", headers=preflight(origin))
            assert requested.status == 403
    assert engine.requests == []


async def test_a_page_that_is_let_in_may_ask_and_read_even_errors(tokenizer, engine):
    async with guarded(engine, tokenizer, let_in(PAGE, "app://obsidian.md")) as client:
        headers = preflight(
            PAGE,
            **{
                "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
                "Access-Control-Request-Private-Network": "true",
            },
        )
        requested = await client.options("/v1/chat/completions", headers=headers)
        assert requested.status == 204
        assert requested.headers["Access-Control-Allow-Origin"] == PAGE
        assert requested.headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
        assert {"GET", "POST", "DELETE"} <= set(requested.headers["Access-Control-Allow-Methods"].split(", "))
        assert requested.headers["Access-Control-Allow-Private-Network"] == "true"
        assert requested.headers["Vary"] == "Origin"
        for body, status in ((ASK, 200), (ASK | {"stream": True}, 200), ({"prompt": 3}, 400)):
            response = await client.post("/v1/completions", json=body, headers={"Origin": PAGE.upper()})
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == PAGE.upper()
            assert response.headers["Access-Control-Expose-Headers"] == "*"
            assert response.headers["Vary"] == "Origin"
        for other in (PAGE + ".evil.com", PAGE.replace("https", "http"), PAGE + ":8443", "null"):
            refused = await client.post("/v1/completions", json=ASK, headers={"Origin": other})
            assert refused.status == 403
            assert "Access-Control-Allow-Origin" not in refused.headers
            assert refused.headers["Vary"] == "Origin"


async def test_every_page_may_be_let_in_but_never_with_its_cookies(tokenizer, engine):
    async with guarded(engine, tokenizer, let_in("*")) as client:
        for origin in (PAGE, "null"):
            requested = await client.options("/v1/completions", headers=preflight(origin))
            response = await client.post("/v1/completions", json=ASK, headers={"Origin": origin})
            for answer in (requested, response):
                assert answer.status in (200, 204)
                assert answer.headers["Access-Control-Allow-Origin"] == "*"
                assert "Access-Control-Allow-Credentials" not in answer.headers


async def test_a_page_that_is_let_in_needs_a_key_too_and_asks_beforehand_without(tokenizer, engine):
    keyed = AuthMiddleware(KeyStore([ALICE]), Origins([PAGE], keyed=True))
    async with guarded(engine, tokenizer, keyed) as client:
        requested = await client.options("/v1/completions", headers=preflight(PAGE))
        assert requested.status == 204
        without = await client.post("/v1/completions", json=ASK, headers={"Origin": PAGE})
        assert (without.status, without.headers["Access-Control-Allow-Origin"]) == (401, PAGE)
        assert (await client.post("/v1/completions", json=ASK, headers=bearer(ALICE) | {"Origin": PAGE})).status == 200


async def test_header_names_that_are_none_are_not_given_back(tokenizer, engine):
    async with guarded(engine, tokenizer, let_in(PAGE)) as client:
        headers = preflight(PAGE, **{"Access-Control-Request-Headers": "x-a: <script>"})
        requested = await client.options("/v1/completions", headers=headers)
        assert "Access-Control-Allow-Headers" not in requested.headers


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://127.0.0.1", "127.0.0.1", True),
        ("http://192.168.1.7:8000", "192.168.1.7:8000", True),
        ("http://foresay:8000", "foresay:8000", True),
        ("http://gpu.local:8000", "gpu.local:8000", True),
        ("http://gpu.example.org:8000", "gpu.example.org:8000", True),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", False),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("http://rebound.evil.com:8000", "rebound.evil.com:8000", False),
        ("http://rebound.evil.com.:8000", "rebound.evil.com.:8000", False),
        ("http://127.0.0.1.evil.com", "127.0.0.1.evil.com", False),
        ("http://notlocal", "127.0.0.1:8000", False),
        ("http://", "", False),
    ],
)
async def test_the_servers_own_pages_are_let_in_unless_their_name_could_be_anybodys(
    tokenizer, engine, origin, host, own
):
    async with guarded(engine, tokenizer, let_in(host="gpu.example.org")) as client:
        response = await client.post("/v1/completions", json=ASK, headers={"Origin": origin, "Host": host})
        assert response.status == (200 if own else 403)


async def test_where_a_key_is_needed_any_name_will_do_for_the_servers_own_pages(tokenizer, engine):
    headers = bearer(ALICE) | {"Origin": "https://ai.example.com", "Host": "ai.example.com"}
    async with guarded(engine, tokenizer, AuthMiddleware(KeyStore([ALICE]))) as client:
        assert (await client.post("/v1/completions", json=ASK, headers=headers)).status == 200
        assert (await client.post("/v1/completions", json=ASK, headers=headers | {"Host": "other.com"})).status == 403


# -- by which name -----------------------------------------------------------------------------------------------------

REBOUND = {"Host": "attacker.example:8000"}


def at(host: str, **given) -> AuthMiddleware:
    """The gateway of a server that listens there."""
    return AuthMiddleware.of(ServeConfig(host=host, **given))


def reads(client) -> list[str]:
    """Every path that is there to be read, a word in place of what varies."""
    routes = [route for route in client.app.router.routes() if route.method == "GET"]
    return sorted({re.sub(r"\{.*\}", "x", route.resource.canonical) for route in routes})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_page_whose_name_was_pointed_here_reads_nothing(tokenizer, engine, host):
    """DNS rebinding: to the browser the request is one of the page's own, and has no origin."""
    async with guarded(engine, tokenizer, at(host)) as client:
        paths = reads(client)
        assert {"/server_info", "/metrics", "/v1/models", "/api/tags", "/health", "/v1/responses"} <= {*paths}
        for path in set(paths) - ANY_NAME_PATHS:
            for method in ("GET", "HEAD"):
                response = await client.request(method, path, headers=REBOUND)
                assert response.status == 403, path
            assert "attacker.example" in await (await client.get(path, headers=REBOUND)).text()
        assert (await client.post("/v1/completions", json=ASK, headers=REBOUND)).status == 403
        assert await handshake(client, headers=REBOUND) == 403
    assert engine.requests == []


async def test_whether_it_is_ready_is_answered_under_any_name(tokenizer, engine):
    async with guarded(engine, tokenizer, at("127.0.0.1")) as client:
        response = await client.get("/ready", headers=REBOUND)
        assert (response.status, await response.json()) == (200, {"status": "ready"})
        assert {"/ready"} == ANY_NAME_PATHS


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "localhost:8000", "LocalHost.", "10.0.0.7:8000", "foresay:8000",
     "host.docker.internal:8000", "gpu.local"],
)  # fmt: skip
async def test_names_that_nobody_else_can_point_here_read_everything(tokenizer, engine, host):
    async with guarded(engine, tokenizer, at("127.0.0.1")) as client:
        for path in ("/metrics", "/v1/models", "/server_info", "/api/tags", "/dashboard/state"):
            assert (await client.get(path, headers={"Host": host})).status == 200, path
        assert (await client.post("/v1/completions", json=ASK, headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "auth",
    [
        at("127.0.0.1", cors_origin=("http://attacker.example:8000",)),
        at("127.0.0.1", cors_origin=("https://attacker.example:8000",)),
        at("127.0.0.1", cors_origin=("*",)),
        at("0.0.0.0"),
        at("192.168.1.7"),
        AuthMiddleware(KeyStore([ALICE]), Origins(host="127.0.0.1", keyed=True)),
    ],
    ids=["let in", "let in over TLS", "all let in", "all addresses", "an address", "a key"],
)
async def test_names_are_free_where_they_were_let_in_or_where_it_is_no_secret(tokenizer, engine, auth):
    async with guarded(engine, tokenizer, auth) as client:
        for path in ("/metrics", "/v1/models"):
            assert (await client.get(path, headers=REBOUND | bearer(ALICE))).status == 200


async def test_programs_that_name_no_host_are_answered(tokenizer, engine):
    async with guarded(engine, tokenizer, at("127.0.0.1")) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


# -- WebSocket ---------------------------------------------------------------------------------------------------------


async def handshake(client, **given) -> int:
    """The status of the answer to a handshake: 101 if it was let in."""
    try:
        async with client.ws_connect("/v1/responses", **given):
            return 101
    except aiohttp.WSServerHandshakeError as refused:
        return refused.status


@pytest.mark.parametrize("allowed", [(), (PAGE,), ("*",)])
async def test_a_page_cannot_take_over_a_socket(tokenizer, engine, allowed):
    async with guarded(engine, tokenizer, let_in(*allowed)) as client:
        assert await handshake(client) == 101, "programs name no origin"
        own = f"http://{client.host}:{client.port}"
        assert await handshake(client, origin=own) == 101
        assert await handshake(client, origin=PAGE) == (101 if allowed else 403)
        assert await handshake(client, origin="https://evil.com") == (101 if allowed == ("*",) else 403)
        rebound = {"Host": f"evil.com:{client.port}"}
        assert await handshake(client, origin=f"http://evil.com:{client.port}", headers=rebound) == (
            101 if allowed == ("*",) else 403
        )


async def test_a_socket_needs_a_key_wherever_browsers_can_put_it(tokenizer, engine):
    async with guarded(engine, tokenizer, AuthMiddleware(KeyStore([ALICE]))) as client:
        assert await handshake(client) == 401
        assert await handshake(client, headers=bearer("sk-wrong-0123456789")) == 401
        assert await handshake(client, headers=bearer(ALICE)) == 101
        assert await handshake(client, headers={"x-api-key": ALICE}) == 101
        offered = ("foresay.v1.json", f"openai-insecure-api-key.{ALICE}")
        async with client.ws_connect("/v1/responses", protocols=offered) as socket:
            assert socket.protocol == "foresay.v1.json", "the key is not given back"
        assert await handshake(client, protocols=("foresay.v1.json", "openai-insecure-api-key.wrong")) == 401
        assert await handshake(client, params={"api_key": ALICE}) == 101
        assert await handshake(client, params={"api_key": "wrong"}) == 401
        assert (await client.get("/v1/models", params={"api_key": ALICE})).status == 401
