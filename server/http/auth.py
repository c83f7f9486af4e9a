"""What every request passes first: checks of origin, key and body size, and the identification of its caller.

A page of any site can send requests to a server on the reader's own machine or network. So a request with an Origin
header is refused unless that origin is allowed (``cors_origin``) or the server's own. Own means that Origin and Host
are equal and that Host is not a name which others could point at this machine (DNS rebinding), unless keys are
required, which such a page would not have. Requests without an origin come from programs, or from a page whose browser
considers them same-origin: a server bound to this machine only answers neither under such a name.

::

    record ── request id, error bodies ── AuthMiddleware.admit: origin, host, preflight, key, body, rate ── route
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from aiohttp import web

from foresay.server.api.common.route import MOST_BYTES, spellings
from foresay.server.gateway.keys import ANYONE, CONTEXT, Caller, KeyStore, hashed, matches, serve
from foresay.server.models.models import MODELS
from foresay.server.schemas.errors import Compressed, Forbidden, NotAdmin, TooLarge, Unauthorized
from foresay.server.settings.config import ServeConfig

#: The routes that open WebSockets.
SOCKET_PATHS = spellings("/v1/responses")
#: Browsers cannot set headers on a WebSocket; OpenAI's workaround is to send the key as a sub-protocol.
KEY_PROTOCOL = "openai-insecure-api-key."


def opens_socket(request: web.Request) -> bool:
    """Whether the request is a WebSocket handshake on a path that has WebSockets."""
    headers = request.headers
    upgrade, connection = headers.get("Upgrade", "").lower(), headers.get("Connection", "").lower()
    requested = upgrade.strip() == "websocket" and "upgrade" in connection and "Sec-WebSocket-Key" in headers
    return requested and request.method == "GET" and request.path in SOCKET_PATHS


def presented(request: web.Request) -> str | None:
    """The key in ``Authorization: Bearer``, in ``x-api-key``, or, of a WebSocket, in a sub-protocol or ``?api_key=``.

    Other requests may not send it in the URL, since URLs end up in logs. Raises :class:`Unauthorized` for one that
    does, and for repeated headers.
    """
    for name in ("Authorization", "x-api-key"):
        if len(request.headers.getall(name, ())) > 1:
            raise Unauthorized(f"Two {name} headers were sent; send one")
    scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    header = request.headers.get("x-api-key", "").strip()
    if header:
        return header
    if opens_socket(request):
        return _of_socket(request)
    if "api_key" in request.query:
        raise Unauthorized(
            "A key in the address opens WebSockets only, since addresses end up in logs; send it as: "
            "Authorization: Bearer KEY"
        )
    return None


def _of_socket(request: web.Request) -> str | None:
    for offered in ",".join(request.headers.getall("Sec-WebSocket-Protocol", [])).split(","):
        if offered.strip().startswith(KEY_PROTOCOL):
            return offered.strip().removeprefix(KEY_PROTOCOL)
    return request.query.get("api_key") or None


ANY = "*"
#: Suffixes of names that no public registry assigns.
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
METHODS = "GET, POST, DELETE, OPTIONS"
REMEMBER_SECONDS = 600
_HEADER_NAMES = re.compile(r"[\w\-, ]{0,2000}")


def is_loopback(host: str) -> bool:
    """Whether this address is reachable only from this machine."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


class Origins:
    """Which origins are allowed. host: the name the server listens on. keyed: whether requests also need a key."""

    def __init__(self, allowed: Collection[str] = (), host: str = "", keyed: bool = False) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)
        self._host, self._keyed, self._alone = host, keyed, is_loopback(host)

    def check(self, request: web.Request) -> None:
        """Raise :class:`Forbidden` for a page of an origin that is not allowed."""
        origin = request.headers.get("Origin")
        if origin is None or self.allows(origin) or self._is_own(origin, request.headers.get("Host", "")):
            return
        raise Forbidden(
            f"Web pages of {origin[:200]} may not use this server; "
            "to let them in, start it with --cors-origin and that origin"
        )

    def check_host(self, request: web.Request) -> None:
        """Raise :class:`Forbidden` if the Host header is a name that others could point at this machine.

        A page of that name could then read the response, and its request would have no origin. If the server is open to
        other machines without a key anyway, only paths that show texts are protected.
        """
        host, path = request.headers.get("Host", "").lower(), request.path
        if self._keyed or path in ANY_NAME_PATHS or not (self._alone or path.startswith(OWN_NAMES_ONLY)):
            return
        if self._is_ours(host) or any(self.allows(f"{way}://{host}") for way in ("http", "https")):
            return
        raise Forbidden(
            f"This server does not answer under the name {host[:200]}, which anybody could point at it; "
            "start it with an API key, or with --cors-origin and the origin that browsers see"
        )

    def allows(self, origin: str) -> bool:
        """Whether pages of ``origin``, which is not the server's own, are allowed."""
        return ANY in self._allowed or origin.lower() in self._allowed

    def preflight(self, request: web.Request) -> web.Response | None:
        """The response to a CORS preflight; None if the request is not one."""
        requested = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not requested:
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(REMEMBER_SECONDS)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if wanted and _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def headers(self, request: web.Request) -> dict[str, str]:
        """CORS headers of a response, so that the browser shows it to the page. Credentials (cookies) are never
        allowed."""
        if not self._allowed:
            return {}
        added = {} if ANY in self._allowed else {"Vary": "Origin"}
        origin = request.headers.get("Origin")
        if origin is not None and self.allows(origin):
            added["Access-Control-Allow-Origin"] = ANY if ANY in self._allowed else origin
            added["Access-Control-Expose-Headers"] = ANY
        return added

    def _is_own(self, origin: str, host: str) -> bool:
        _, _, authority = origin.lower().partition("://")
        return bool(authority) and authority == host.lower() and (self._keyed or self._is_ours(authority))

    def _is_ours(self, authority: str) -> bool:
        """Whether no one outside can point this name at this machine."""
        name = _without_port(authority)
        own = name == self._host.lower() or "." not in name or name.endswith(PRIVATE)
        return own or _address(name) is not None


def _without_port(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].rstrip(".")


#: Paths that need no key: they reveal only the model's name and state, and probes and load balancers have no key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/openapi.json", "/dashboard"})
#: The dashboard's files.
OPEN_FOLDER = "/dashboard/static/"
#: Paths that a browser may read only under the server's own names, wherever it listens: they show the user's prompts.
OWN_NAMES_ONLY = "/dashboard/"
#: Paths answered under any name, since they reveal only that a server exists.
ANY_NAME_PATHS = frozenset({"/ready"})
#: Paths that need the admin key.
ADMIN = "/admin/"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AuthMiddleware:
    """Checks all requests of one server."""

    def __init__(
        self,
        key_store: KeyStore | None = None,
        origins: Origins | None = None,
        largest_body: int | None = None,
        admin_key: str | None = None,
    ) -> None:
        self._admin = None if admin_key is None else hashed(admin_key)
        self.key_store = key_store or KeyStore()
        self.origins = origins or Origins(keyed=self.key_store.needed)
        self.largest_body = largest_body

    @classmethod
    def of(cls, config: ServeConfig) -> AuthMiddleware:
        """The middleware that the settings describe. Raises :class:`foresay.spec.errors.ConfigurationError` if the key
        file cannot be used."""
        key_store = KeyStore(config.api_key, config.api_key_file, config.max_requests_per_minute)
        origins = Origins(config.cors_origin, config.host, key_store.needed)
        return cls(key_store, origins, config.max_body_bytes, config.admin_key)

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass the request on to its route, with its caller in the context, or refuse it."""
        self.origins.check(request)
        self.origins.check_host(request)
        preflight = self.origins.preflight(request)
        if preflight is not None:
            return preflight
        serve(caller=self._caller(request))
        if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise Compressed("Send the body uncompressed: this server does not decompress (Content-Encoding)")
        most = self.largest_body or request.app[MODELS].largest_body
        if (request.content_length or 0) > most:
            raise TooLarge(most)
        if request.body_exists:
            CONTEXT.get().caller.rate_limiter.enter()
        request[MOST_BYTES] = most
        return await handler(request)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add CORS and other headers to a response."""
        response.headers.update(self.origins.headers(request))
        response.headers["Server"] = "foresay"
        response.headers["X-Content-Type-Options"] = "nosniff"

    def _caller(self, request: web.Request) -> Caller:
        if request.path.startswith(ADMIN):
            self._check_admin(request)
            return ANYONE
        if not self.key_store.needed:
            return self.key_store.anyone
        if request.path in OPEN_PATHS or request.path.startswith(OPEN_FOLDER):
            return ANYONE
        key = presented(request)
        if key is None:
            raise Unauthorized("No API key was sent; send it as: Authorization: Bearer KEY", given=False)
        caller = self.key_store.caller(key)
        if caller is None:
            raise Unauthorized("Incorrect API key provided")
        return caller

    def _check_admin(self, request: web.Request) -> None:
        if self._admin is None:
            raise NotAdmin(f"{request.path} needs an admin key, which this server lacks; start it with --admin-key KEY")
        key = presented(request)
        if key is None:
            raise Unauthorized("The admin key was not sent; send it as: Authorization: Bearer KEY", given=False)
        if not matches(self._admin, key):
            raise NotAdmin("This is not the admin key of this server")
