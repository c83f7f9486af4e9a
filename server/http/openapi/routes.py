"""``GET /openapi.json``: this API, described for programs."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from aiohttp import web

from server.api.common.route import ROUTE_MODULES, Route
from server.http.openapi.document import encoded

_encoded = lru_cache(maxsize=1)(encoded)


async def openapi(http: web.Request) -> web.Response:
    """This API as an OpenAPI document."""
    modules: tuple[ModuleType, ...] = http.app[ROUTE_MODULES]
    return web.Response(body=_encoded(modules), content_type="application/json")


ROUTES = [Route("GET", "/openapi.json", openapi)]
