"""The page in a real browser that can reach nothing but the server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, Request, Route, WebSocket, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 120_000
STORY = "Tell me a story about a fox and an owl."
SEND, STOP = "#playground button[type=submit]", "#playground button.stop"
expect.set_options(timeout=PATIENCE)

needs_chromium = pytest.mark.usefixtures("browser")


class Visit:
    """One open page. tried: addresses beyond the server that it requested; complaints: errors of its console."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.tried: list[str] = []
        self.complaints: list[str] = []
        self.sockets: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", self._requested)
        page.on("websocket", self._opened)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)

    def _requested(self, request: Request) -> None:
        if not request.url.startswith(self.url):
            self.tried.append(request.url)

    def _opened(self, socket: WebSocket) -> None:
        self.sockets.append(socket.url)
        if not socket.url.startswith(self.url.replace("http", "ws", 1)):
            self.tried.append(socket.url)

    async def go(self, path: str = "/") -> None:
        await self.page.goto(self.url + path)

    async def ready(self) -> None:
        await self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    async def show(self, view: str) -> None:
        """Go to the playground or to the dashboard, and wait until it is shown: what is hidden takes no focus."""
        await self.page.click(f".views a[href='#{view}']")
        await self.page.wait_for_selector(f".views a[href='#{view}'][aria-current=page]")

    async def run(self, mode: str = "on", prompt: str = STORY, **fields: object) -> None:
        """Ask something in the playground, wait for the answer, and go on to the dashboard."""
        await self.ask(mode, prompt, **fields)
        await self.page.wait_for_selector("#playground form[data-busy=false]", state="attached")
        await self.show("dashboard")

    async def ask(self, mode: str = "on", prompt: str = STORY, **fields: object) -> None:
        """Ask something in the playground."""
        await self.show("playground")
        await self.page.check(f"#playground input[value={mode}]", force=True)
        await self.set(**fields)
        await self.page.fill("#prompt", prompt)
        await self.page.click(SEND)

    async def set(self, **fields: object) -> None:
        """Fill in settings of the playground."""
        await self.page.evaluate("document.querySelector('.settings').open = true")
        for name, value in fields.items():
            await self.page.fill(f"[name={name}]", str(value))

    async def counts(self, answer: Locator) -> tuple[int, int, int]:
        """Tokens, drafted and accepted ones, as the response itself counted them."""
        tokens, drafted, accepted = [
            int(await answer.get_attribute(f"data-{name}") or -1) for name in ("tokens", "drafted", "accepted")
        ]
        return tokens, drafted, accepted

    async def tokens(self, answer: Locator) -> list[tuple[str, int]]:
        """The tokens of an answer as they are shown: text and the depth that the colour tells, 0 for the target's."""
        spans = await answer.locator(".coloured span").evaluate_all("all => all.map(s => [s.textContent, s.className])")
        return [(text, depth_of(classes)) for text, classes in spans]

    async def painted(self, chart: str) -> float:
        """Square pixels of a chart that have a colour which means something."""
        marks = f"#{chart} svg :is(.fill, .line)"
        area = """all => all.map(m => m.getBBox())
            .reduce((sum, box) => sum + Math.max(box.width, 1) * Math.max(box.height, 1), 0)"""
        found: float = await self.page.locator(marks).evaluate_all(area)
        return found

    async def resize(self, width: int) -> None:
        """Give the page another width, and wait until its plots were drawn again: with the next frame."""
        await self.page.set_viewport_size({"width": width, "height": 900})
        await self.page.wait_for_function("width => innerWidth === width", arg=width)
        await self.page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    async def keep_labels(self) -> None:
        """Nothing that the page does later happens: a label that changes for a second can be waited for."""
        await self.page.evaluate("globalThis.setTimeout = () => 0")

    async def paints(self, chart: str) -> None:
        """Wait for more than a dot: one busy second is a narrow column or the beginning of a line, which goes on."""
        async with asyncio.timeout(PATIENCE / 1000):
            while await self.painted(chart) <= 3:
                await asyncio.sleep(0.2)

    async def keep_picture(self, name: str, folder: Path) -> None:
        """A screenshot among the artefacts."""
        place = Path(os.environ.get("TEST_ARTEFACTS") or folder)
        await self.page.screenshot(path=place / f"dashboard-{name}.png", full_page=True)


def depth_of(classes: str) -> int:
    found = [name for name in classes.split() if len(name) == 2 and name[0] == "d"]
    return int(found[0][1]) if found else 0


#: The one that all visits of a process share, while there is one.
_running: list[Browser] = []


@asynccontextmanager
async def chromium() -> AsyncIterator[None]:
    """Start it, for every visit in this block."""
    async with async_playwright() as play:
        _running.append(await play.chromium.launch(executable_path=CHROMIUM, args=SWITCHES, timeout=PATIENCE))
        try:
            yield
        finally:
            await _running.pop().close()


@asynccontextmanager
async def visiting(url: str, pace: Mapping[str, float] | None = None, **context: Any) -> AsyncIterator[Visit]:
    """The page of the server at ``url``, to a browser that has seen nothing before. Whatever else it asks for is
    refused, and a failure in the end. pace: other seconds for constants of race.js."""

    async def refuse(route: Route) -> None:
        if not route.request.url.startswith(url):
            await route.abort()
        elif pace and route.request.url.endswith("/race.js"):
            response = await route.fetch()
            script = await response.text()
            for name, seconds in pace.items():
                script, found = re.subn(rf"^const {name} = [\d.]+;", f"const {name} = {seconds};", script, flags=re.M)
                assert found == 1, name
            await route.fulfill(response=response, body=script)
        else:
            await route.continue_()

    opened = await _running[0].new_context(**{"viewport": {"width": 1480, "height": 980}} | context)
    try:
        await opened.route("**/*", refuse)
        visit = Visit(await opened.new_page(), url)
        yield visit
        assert visit.tried == []
    finally:
        await opened.close()


@asynccontextmanager
async def dashboard(url: str, **context: Any) -> AsyncIterator[Visit]:
    """A visit that has the dashboard before it."""
    async with visiting(url, **context) as visit:
        await visit.go("/dashboard")
        await visit.ready()
        yield visit
