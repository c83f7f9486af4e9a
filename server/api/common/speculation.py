"""What a request says of how it is drafted for, checked: its ``speculation``. The text is the same in any case."""

from __future__ import annotations

from typing import Any

from server.schemas.shared import Speculation
from spec.errors import InvalidRequest
from spec.names import NONE, canonical
from spec.request import EngineInfo
from spec.shape import MAX_NODES

#: Methods that name no drafter: whatever the server would do, and decoding plainly.
ANYBODY, NOBODY = "auto", NONE


def wishes(asked: Speculation | None, info: EngineInfo) -> dict[str, Any]:
    """The fields of a :class:`~spec.request.Request` that say it. Raises InvalidRequest naming the field."""
    if asked is None:
        return {}
    method, most = canonical(asked.method or ANYBODY), asked.max_tokens
    known = (ANYBODY, NOBODY, *info.drafters)
    if method not in known:
        raise InvalidRequest(
            "speculation.method",
            f'speculation.method must be one of {", ".join(known)} on this server, got "{asked.method}"',
        )
    if most is not None and not 0 <= most < MAX_NODES:
        raise InvalidRequest(
            "speculation.max_tokens", f"speculation.max_tokens must be from 0 to {MAX_NODES - 1}, got {most}"
        )
    if asked.off and (method not in (ANYBODY, NOBODY) or most):
        other = "max_tokens" if most else "method"
        raise InvalidRequest("speculation.off", f"speculation.off leaves nothing to draft: leave {other} out, or off")
    named = method if method in info.drafters and len(info.drafters) > 1 else ""
    return {
        "speculate": not asked.off and method != NOBODY and most != 0,
        "draft_method": named,
        "most_drafted": most,
    }
