"""What every request passes first: is the page let in, is the key right, is the body small enough; who is it from.

::

    record ── request id, error bodies ── AuthMiddleware.admit: origin, preflight, key, body ── route ── admitted:
    limits ── engine
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from server.gateway.caller import ANYONE, CALLER, Caller
from server.gateway.credentials import presented
from server.gateway.key_store import KeyStore
from server.gateway.keys import HashedKey
from server.gateway.origins import Origins
from server.gateway.rate_limiter import Limits, RateLimiter, TokenBucket
from server.host.models.models import MODELS
from server.schemas.errors import Compressed, ModelNotFound, NotAdmin, TooLarge, Unauthorized
from server.settings.config import ServeConfig
from spec.errors import InvalidRequest

#: What tells nothing but the model's name and whether it runs; probes and load balancers have no key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/openapi.json", "/dashboard"})
#: The files that the dashboard is made of.
OPEN_FOLDER = "/dashboard/static/"
#: What a browser may read under the server's own names only: the prompts of its user are in there.
OWN_NAMES_ONLY = "/dashboard/"
#: What the admin key alone opens.
ADMIN = "/admin/"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AuthMiddleware:
    """The gateway of one server."""

    def __init__(
        self,
        key_store: KeyStore | None = None,
        origins: Origins | None = None,
        largest_body: int | None = None,
        admin_key: str | None = None,
    ) -> None:
        self._admin = None if admin_key is None else HashedKey.of(admin_key)
        self.key_store = key_store or KeyStore()
        self.origins = origins or Origins(keyed=self.key_store.needed)
        self.largest_body = largest_body

    @classmethod
    def of(cls, config: ServeConfig) -> AuthMiddleware:
        """The gateway that the settings describe. :class:`ConfigurationError` if the key file cannot be used."""
        limits = Limits(**{name: getattr(config, name) for name in Limits.__struct_fields__})
        key_store = KeyStore(config.api_key, config.api_key_file, limits)
        origins = Origins(config.cors_origin, config.host, key_store.needed)
        return cls(key_store, origins, config.max_body_bytes, config.admin_key)

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let the request through to its route, with CALLER set, or refuse it."""
        CALLER.set(ANYONE)
        self.origins.check(request)
        if request.path.startswith(OWN_NAMES_ONLY):
            self.origins.check_host(request)
        preflight = self.origins.preflight(request)
        if preflight is not None:
            return preflight
        CALLER.set(self._caller(request))
        _check_plain(request)
        models, rate_limiter = request.app[MODELS], CALLER.get().rate_limiter
        most = self.largest_body or models.largest_body
        if (request.content_length or 0) > most:
            raise _too_large(most)
        if request.body_exists:
            rate_limiter.check()
        try:
            with models.server.bodies.holding(_announced(request, most), models.server.crowded):
                return await handler(request.clone(client_max_size=most))
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(most) from None
        except (InvalidRequest, ModelNotFound):
            rate_limiter.refused()
            raise

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add what the gateway says about a response before its headers go out."""
        response.headers.update(self.origins.headers(request))
        response.headers.update(rate_headers(CALLER.get().rate_limiter))
        response.headers["Server"] = "foresay"
        response.headers["X-Content-Type-Options"] = "nosniff"

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the key file while the server runs."""
        watching = asyncio.create_task(self.key_store.watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

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
            raise NotAdmin("This server has no admin key, so nobody may do this; start it with --admin-key KEY")
        key = presented(request)
        if key is None:
            raise Unauthorized("The admin key was not sent; send it as: Authorization: Bearer KEY", given=False)
        if not self._admin.matches(key):
            raise NotAdmin("This is not the admin key of this server")


def _check_plain(request: web.Request) -> None:
    """Raise :class:`Compressed` for a body that would have to be inflated."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise Compressed("Send the body as it is: this server inflates none (Content-Encoding)")


def _announced(request: web.Request, most: int) -> int:
    """How many bytes the body may come to have."""
    unknown = request.body_exists and request.content_length is None
    return most if unknown else request.content_length or 0


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"The body is larger than {most:,} bytes, the limit of this server (max_body_bytes)")


def rate_headers(rate_limiter: RateLimiter) -> dict[str, str]:
    """The limits and what is left of them, in the headers that OpenAI's clients read."""
    told: dict[str, str] = {}
    for what, bucket in (("requests", rate_limiter.requests), ("tokens", rate_limiter.tokens)):
        if bucket is not None:
            told |= _rate_headers(what, bucket)
    return told


def _rate_headers(what: str, bucket: TokenBucket) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(bucket.per_minute),
        f"x-ratelimit-remaining-{what}": str(max(0, math.floor(bucket.level))),
        f"x-ratelimit-reset-{what}": f"{bucket.seconds_until(bucket.per_minute):.3f}s",
    }
