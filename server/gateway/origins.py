"""Which web pages may use the server: their origin, as browsers state it.

A page of any site can send requests to a server on the reader's own machine or network. So a request that names an
origin is refused unless it is one that was let in (``cors_origin``) or the server's own. Own means that Origin and Host
are equal and that Host is no name which somebody else could point at this machine (DNS rebinding), unless keys are
needed, which such a page would not have. Requests without an origin come from programs, or change nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from aiohttp import web

from server.schemas.errors import Forbidden

ANY = "*"
#: Ends of names that no public registry hands out.
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
METHODS = "GET, POST, DELETE, OPTIONS"
REMEMBER_SECONDS = 600
_HEADER_NAMES = re.compile(r"[\w\-, ]{0,2000}")


class Origins:
    """Which origins are let in. host: the name the server listens on. keyed: whether a request needs a key as well."""

    def __init__(self, allowed: Collection[str] = (), host: str = "", keyed: bool = False) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)
        self._host, self._keyed = host, keyed

    def check(self, request: web.Request) -> None:
        """Raise :class:`Forbidden` for a page that is not let in."""
        origin = request.headers.get("Origin")
        if origin is None or self.allows(origin) or self._is_own(origin, request.headers.get("Host", "")):
            return
        raise Forbidden(
            f"Web pages of {origin[:200]} may not use this server; "
            "to let them in, start it with --cors-origin and that origin"
        )

    def check_host(self, request: web.Request) -> None:
        """Raise :class:`Forbidden` if the server was asked under a name that somebody else could point at this machine.

        A page of that name could then read the answer, and its request would have no origin.
        """
        host = request.headers.get("Host", "").lower()
        if self._keyed or self._is_ours(host) or any(self.allows(f"{way}://{host}") for way in ("http", "https")):
            return
        raise Forbidden(
            f"The dashboard is not shown under the name {host[:200]}; "
            "start the server with an API key, or with --cors-origin and the origin that browsers see"
        )

    def allows(self, origin: str) -> bool:
        """Whether pages of ``origin``, which is another than the server's, are let in."""
        return ANY in self._allowed or origin.lower() in self._allowed

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks beforehand; None if this is no such question."""
        asked = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not asked:
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(REMEMBER_SECONDS)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if wanted and _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def headers(self, request: web.Request) -> dict[str, str]:
        """What a response says, so that the browser shows it to the page. Credentials (cookies) are never let in."""
        if not self._allowed:
            return {}
        told = {} if ANY in self._allowed else {"Vary": "Origin"}
        origin = request.headers.get("Origin")
        if origin is not None and self.allows(origin):
            told["Access-Control-Allow-Origin"] = ANY if ANY in self._allowed else origin
            told["Access-Control-Expose-Headers"] = ANY
        return told

    def _is_own(self, origin: str, host: str) -> bool:
        _, _, authority = origin.lower().partition("://")
        return bool(authority) and authority == host.lower() and (self._keyed or self._is_ours(authority))

    def _is_ours(self, authority: str) -> bool:
        """Whether nobody else can make this name mean this machine."""
        name = _without_port(authority)
        if name == self._host.lower() or "." not in name or name.endswith(PRIVATE):
            return True
        return _is_address(name)


def _without_port(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
