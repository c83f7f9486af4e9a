"""Where clients put their key."""

from __future__ import annotations

from aiohttp import web

#: Browsers can set no header on a WebSocket; OpenAI's idiom for them is a sub-protocol that is no protocol.
KEY_PROTOCOL = "openai-insecure-api-key."


def opens_socket(request: web.Request) -> bool:
    """Whether the request asks for a WebSocket."""
    return request.headers.get("Upgrade", "").lower() == "websocket"


def presented(request: web.Request) -> str | None:
    """The key in ``Authorization: Bearer``, in ``x-api-key``, or, of a WebSocket, in a sub-protocol or ``?api_key=``.

    Other requests may not name it in their address, since addresses end up in logs.
    """
    scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    header = request.headers.get("x-api-key", "").strip()
    if header:
        return header
    return _of_socket(request) if opens_socket(request) else None


def _of_socket(request: web.Request) -> str | None:
    for offered in ",".join(request.headers.getall("Sec-WebSocket-Protocol", [])).split(","):
        if offered.strip().startswith(KEY_PROTOCOL):
            return offered.strip().removeprefix(KEY_PROTOCOL)
    return request.query.get("api_key") or None
