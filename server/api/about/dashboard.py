"""The page that shows what speculation does, and what fills it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files

import msgspec
from aiohttp import web

from server.api.about.feed import Feed, State, listed
from server.api.common.route import Route, json_response
from server.gateway.caller import CALLER
from server.host.models.models import MODELS, Entry
from server.observe.telemetry.report import RequestDetail, RequestSummary
from server.schemas.errors import ApiError
from spec.errors import InvalidRequest

# -- the files of the page ---------------------------------------------------------------------------------------------


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


# -- routes ------------------------------------------------------------------------------------------------------------

FEED: web.AppKey[Feed] = web.AppKey("feed", Feed)


class RequestNotFound(ApiError):
    """No such request of this key is kept."""

    status, type, code, param = 404, "invalid_request_error", "request_not_found", "request_id"


def _chosen(http: web.Request) -> Entry:
    """The model that the numbers are of."""
    return http.app[MODELS].chosen(http.query.get("model"))


async def page(http: web.Request) -> web.Response:
    """The page. It asks for a key itself if the server wants one."""
    return served(http, PAGE)


async def static(http: web.Request) -> web.Response:
    """What the page is made of."""
    return served(http, http.match_info["name"])


async def state(http: web.Request) -> web.Response:
    """What the engine did and does: the numbers of the dashboard and their history. Of all keys together, no text.

    Of one model; ``model`` says which, if there are several.
    """
    telemetry = _chosen(http).service.telemetry
    return json_response(State(await telemetry.snapshot(), await telemetry.history(), listed(http.app[MODELS])))


async def feed(http: web.Request) -> web.StreamResponse:
    """The same as it changes, an event a second. ``since``: the first second that is news."""
    given = http.query.get("since", "0")
    if not given.isdecimal() or len(given) > 12:
        raise InvalidRequest("since", f"since must be a number of seconds since 1970, got {given!r}")
    return await http.app[FEED].serve(http, http.app[MODELS], _chosen(http).service, int(given) - 1)


async def requests(http: web.Request) -> web.Response:
    """The last requests of the key that asks, the newest first."""
    return json_response(_chosen(http).service.telemetry.requests(CALLER.get().tenant))


async def request(http: web.Request) -> web.Response:
    """One request of the key that asks: each of its steps, and its text with the origin of every token."""
    id = http.match_info["request_id"]
    detail = _chosen(http).service.telemetry.request(CALLER.get().tenant, id)
    if detail is None:
        raise RequestNotFound(f"Request {id[:200]!r} is not kept: it was another key's, or it had to make room")
    return json_response(detail)


READ_ERRORS = (401, 403, 404)
QUERY = (("model", "string", "which model's numbers, where there are several; the first one unless it is given"),)
ROUTES = [
    web.get("/dashboard", page),
    web.get("/dashboard/static/{name}", static),
    web.get("/dashboard/feed", feed, allow_head=False),
    Route("GET", "/dashboard/state", state, answer=State, errors=READ_ERRORS, query=QUERY),
    Route("GET", "/dashboard/requests", requests, answer=list[RequestSummary], errors=READ_ERRORS, query=QUERY),
    Route(
        "GET",
        "/dashboard/requests/{request_id}",
        request,
        answer=RequestDetail,
        errors=READ_ERRORS,
        parameters=(("request_id", "the id of a request in that list"),),
        query=QUERY,
    ),
]
