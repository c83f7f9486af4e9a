"""Who sent the request that the running task serves."""

from __future__ import annotations

import re
from contextvars import ContextVar

import msgspec

from server.gateway.allowance import Allowance


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. allowance: how much they may ask for."""

    name: str = ""
    tenant: str = ""
    allowance: Allowance = msgspec.field(default_factory=Allowance)


ANYONE = Caller()
#: Set by the gateway for each HTTP request and each WebSocket connection.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
#: The id of the HTTP request, or of the one that opened the WebSocket, that the running task serves.
REQUEST_ID: ContextVar[str] = ContextVar("request_id")
#: Ids stand in headers, in lines of logs and in every event of a stream.
ID_WANTED = "1 to 128 letters, digits or _ - . : / + = @"
ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")


def usable_id(given: str) -> bool:
    """Whether a client's id for its request can be taken over."""
    return ID.fullmatch(given) is not None
