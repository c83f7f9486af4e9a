"""The files of the page, read once from the package, with what a browser has to know about them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files

import msgspec
from aiohttp import web

PAGE = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Nothing from anywhere else, nothing inline, and no other page around this one.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for again: an upgraded server has another page
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
}


class Asset(msgspec.Struct, frozen=True):
    """One file. etag: changes with the content."""

    body: bytes
    content_type: str
    etag: str


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """All files by name."""
    return {
        file.name: _asset(file.read_bytes(), TYPES[file.name[file.name.rindex(".") :]])
        for file in files(__package__).joinpath("static").iterdir()
        if file.is_file()
    }


def _asset(body: bytes, content_type: str) -> Asset:
    return Asset(body, content_type, hashlib.blake2b(body, digest_size=12).hexdigest())


def served(http: web.Request, name: str) -> web.Response:
    """The file of this name, or the word that the browser has it already. 404 if there is none."""
    asset = assets().get(name)
    if asset is None:
        raise web.HTTPNotFound
    if any(etag.value == asset.etag for etag in http.if_none_match or ()):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=HEADERS)
    response.etag = asset.etag
    return response


def wants_page(http: web.Request) -> bool:
    """Whether a browser asks, and not a program."""
    return "text/html" in http.headers.get("Accept", "")
