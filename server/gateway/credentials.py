"""Where clients put their key."""

from __future__ import annotations

from aiohttp import web

from server.schemas.errors import Unauthorized

#: The routes that open WebSockets.
SOCKET_PATHS = frozenset({"/v1/responses"})
#: Browsers can set no header on a WebSocket; OpenAI's idiom for them is a sub-protocol that is no protocol.
KEY_PROTOCOL = "openai-insecure-api-key."


def opens_socket(request: web.Request) -> bool:
    """Whether the request is the handshake of a WebSocket, where there is one."""
    headers = request.headers
    upgrade, connection = headers.get("Upgrade", "").lower(), headers.get("Connection", "").lower()
    asked = upgrade.strip() == "websocket" and "upgrade" in connection and "Sec-WebSocket-Key" in headers
    return asked and request.method == "GET" and request.path in SOCKET_PATHS


def presented(request: web.Request) -> str | None:
    """The key in ``Authorization: Bearer``, in ``x-api-key``, or, of a WebSocket, in a sub-protocol or ``?api_key=``.

    Other requests may not name it in their address, since addresses end up in logs. :class:`Unauthorized` for one that
    does and for one that says twice who it is.
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
