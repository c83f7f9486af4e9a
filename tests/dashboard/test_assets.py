"""The page's files: who gets them, with which headers, and that they need nothing else; and their colours."""

from __future__ import annotations

import re

import pytest

from foresay.server.api.about.routes import POLICY
from foresay.server.api.about.routes import STATIC as FOLDER
from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from foresay.spec.names import DRAFTERS, NONE
from tests.dashboard.seeing import Colour, contrast, nearest
from tests.gateway.guarded import ALICE, bearer, guarded
from tests.server.scripted import END, ScriptedEngine, served

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = "/dashboard/static/"


@pytest.mark.parametrize(("path", "headers"), [("/", BROWSER), ("/dashboard", BROWSER), ("/dashboard", {})])
async def test_browsers_get_the_page(tokenizer, path, headers):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.get(path, headers=headers)
        assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "<title>Foresay</title>" in await response.text()


async def test_programs_still_get_the_index(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
            assert (await (await client.get("/", headers=headers)).json())["name"] == "foresay"


async def test_every_file_has_its_type_and_is_sent_once(tokenizer):
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    async with served(ScriptedEngine([END]), tokenizer) as client:
        for name, text in texts().items():
            response = await client.get(STATIC + name)
            assert (response.status, response.content_type) == (200, types[name.rpartition(".")[2]])
            assert await response.text() == text
            tag = response.headers["ETag"]
            again = await client.get(STATIC + name, headers={"If-None-Match": f'"other", {tag}'})
            assert (again.status, await again.read(), again.headers["ETag"]) == (304, b"", tag)
            assert again.headers["Content-Security-Policy"] == POLICY
            other = await client.get(STATIC + name, headers={"If-None-Match": '"other"'})
            assert other.status == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2f__init__.py", "../assets.py", "%2e%2e/feed.py", "main.js%00", "main.js%2f", "a" * 300]
)
async def test_there_is_nothing_else(tokenizer, name):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        assert (await client.get(STATIC + name)).status == 404


async def test_the_page_is_open_and_its_data_is_not(tokenizer):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware(KeyStore([ALICE]))) as client:
        assert (await client.get("/", headers=BROWSER)).status == 200
        for name in texts():
            assert (await client.get(STATIC + name)).status == 200
        for path in ("state", "feed", "requests", "requests/x", "static", "static2/main.js"):
            assert (await client.get(f"/dashboard/{path}")).status == 401, path
        assert (await client.get("/dashboard/state", headers=bearer(ALICE))).status == 200


def texts() -> dict[str, str]:
    return {file.name: file.read_text("utf-8") for file in FOLDER.iterdir()}


def test_what_the_files_refer_to_is_there():
    for name, text in texts().items():
        named = re.findall(r'from "\./([\w.]+)"', text) + re.findall(r'(?:src|href)="dashboard/static/([\w.]+)"', text)
        assert set(named) <= set(texts()), name
    reached, left = set(), ["index.html"]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += re.findall(r"(?:\./|dashboard/static/)([\w.]+\.(?:js|css|svg))\"", texts()[name])
    assert reached == set(texts())


def test_they_name_no_other_site_and_hold_no_code_of_others():
    for name, text in texts().items():
        addresses = set(re.findall(r"\w+://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"licen[cs]e|copyright|@import|\burl\((?!#)", text), name
        assert max(map(len, text.splitlines())) <= 120, name


def test_the_policy_is_kept():
    """Inline scripts and styles would be dropped by the browser, and HTML made of text is how pages are taken over."""
    page = texts()["index.html"]
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script>(?!\s*</)", page)
    for name, text in texts().items():
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), name


def test_no_word_is_true_in_one_theme_alone():
    """What is darker in one is brighter in the other."""
    for name, text in texts().items():
        assert not re.search(r"\b(dark|bright|light|pal)er\b", text), name


# -- colours, in both themes -------------------------------------------------------------------------------------------


THEMES = ("light", "dark")


def themed(theme: str) -> dict[str, Colour]:
    """The variables of a theme that are colours."""
    blocks = (FOLDER / "theme.css").read_text("utf-8").split(":root")
    found: dict[str, Colour] = {}
    for block in blocks if theme == "dark" else blocks[:2]:
        for name, digits in re.findall(r"--([\w-]+): #([0-9a-f]{6});", block):
            red, green, blue = bytes.fromhex(digits)
            found[name] = float(red), float(green), float(blue)
    return found


@pytest.mark.parametrize("theme", THEMES)
def test_every_drafter_has_a_colour_that_every_eye_distinguishes(theme: str) -> None:
    colours = themed(theme)
    drafters = {name: colours[name] for name in (*DRAFTERS, NONE)}
    distance, which = nearest(drafters)
    assert distance > 0.085, which
    for name, colour in drafters.items():
        assert contrast(colour, colours["card"]) >= 2.9 if name == NONE else 3.0, name
