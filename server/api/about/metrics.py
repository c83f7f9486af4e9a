"""``/metrics`` for Prometheus."""

from __future__ import annotations

from aiohttp import web

from foresay.server.api.common.route import Route
from foresay.server.host.models.models import MODELS


async def metrics(request: web.Request) -> web.Response:
    """Counters, gauges and histograms, for Prometheus."""
    body, content_type = await request.app[MODELS].exposition.text(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


ROUTES = [Route("GET", "/metrics", metrics, media="text/plain")]
