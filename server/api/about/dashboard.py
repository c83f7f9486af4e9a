"""The page that shows what speculation does, and what fills it."""

from __future__ import annotations

from aiohttp import web

from server.api.about.assets import PAGE, served
from server.api.about.feed import Feed, State, listed
from server.api.common.route import Route, json_response
from server.gateway.caller import CALLER
from server.host.models.models import MODELS, Entry
from server.observe.telemetry.report import RequestDetail, RequestSummary
from server.schemas.errors import ApiError
from spec.errors import InvalidRequest

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
