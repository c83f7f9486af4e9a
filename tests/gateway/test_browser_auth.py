"""What a real browser lets a page of another site do with the server, a rebound name included."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from playwright.async_api import async_playwright

from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware, Origins
from tests.dashboard.browsing import CHROMIUM, PATIENCE, SWITCHES
from tests.gateway.guarded import ALICE, guarded
from tests.server.scripted import END, ScriptedEngine

RESOLVE = "--host-resolver-rules=MAP evil.test 127.0.0.1"
#: Each returns what the page got to see.
ASK = """async ([url, key]) => {
    const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
    const body = JSON.stringify({prompt: "x", max_tokens: 3, stream: true});
    try {
        const response = await fetch(url + "/v1/completions", {method: "POST", headers, body});
        return [response.status, await response.text(), response.headers.get("X-Request-Id")];
    } catch (error) { return [0, String(error), null]; }
}"""
ASK_BLINDLY = """async ([url]) => {
    const body = JSON.stringify({prompt: "x", max_tokens: 3});
    const response = await fetch(url + "/v1/completions", {method: "POST", mode: "no-cors", body});
    return response.type;
}"""
CONNECT = """([url, protocols]) => new Promise(resolve => {
    const socket = new WebSocket(url.replace(/^http/, "ws") + "/v1/responses", protocols);
    socket.onopen = () => { resolve("open " + socket.protocol); socket.close(); };
    socket.onerror = () => resolve("refused");
})"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs Chromium (apt install chromium)"
)


@asynccontextmanager
async def page_of_another_site() -> AsyncIterator[tuple[Any, str]]:
    """A browser's page and its origin."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="<title>another site</title>", content_type="text/html")

    site = web.Application()
    site.add_routes([web.get("/", hello)])
    async with TestServer(site) as server, async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=[*SWITCHES, RESOLVE], timeout=PATIENCE)
        page = await browser.new_page()
        origin = f"http://127.0.0.1:{server.port}"
        await page.goto(origin)
        yield page, origin
        await browser.close()


async def test_what_a_page_of_another_site_can_do(tokenizer):
    shut, opened = (ScriptedEngine([*tokenizer.encode("abc"), END]) for _ in range(2))
    async with page_of_another_site() as (page, origin):
        async with guarded(shut, tokenizer, AuthMiddleware()) as client:
            url = f"http://127.0.0.1:{client.port}"
            assert (await page.evaluate(ASK, [url, None]))[0] == 0
            assert await page.evaluate(ASK_BLINDLY, [url]) == "opaque"
            assert await page.evaluate(CONNECT, [url, []]) == "refused"
            rebound = f"http://evil.test:{client.port}"
            await page.goto(f"{rebound}/health")
            status, text, _ = await page.evaluate(ASK, [rebound, None])
            assert (status, "origin_not_allowed" in text) == (403, True), "its own origin to the browser, not to us"
            assert await page.evaluate(CONNECT, [rebound, []]) == "refused"
            await page.goto(f"{url}/health")
            assert (await page.evaluate(ASK, [url, None]))[0] == 200, "the server's own page"
            assert await page.evaluate(CONNECT, [url, []]) == "open "
            assert len(shut.requests) == 1
        await page.goto(origin)
        auth = AuthMiddleware(KeyStore([ALICE]), Origins([origin], keyed=True))
        async with guarded(opened, tokenizer, auth) as client:
            url = f"http://127.0.0.1:{client.port}"
            status, text, name = await page.evaluate(ASK, [url, ALICE])
            assert (status, text.endswith("data: [DONE]\n\n"), len(name)) == (200, True, 32)
            status, text, _ = await page.evaluate(ASK, [url, "sk-wrong-0123456789"])
            assert (status, "invalid_api_key" in text) == (401, True)
            for key, seen in ((ALICE, "open foresay.v1.json"), ("wrong", "refused")):
                offered = ["foresay.v1.json", f"openai-insecure-api-key.{key}"]
                assert await page.evaluate(CONNECT, [url, offered]) == seen
