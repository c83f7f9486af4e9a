"""Who sent the request that the running task serves."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant."""

    name: str = ""
    tenant: str = ""


ANYONE = Caller()
#: Set by the gateway for each HTTP request and each WebSocket connection.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
