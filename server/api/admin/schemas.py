"""What travels to and from ``/admin``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from server.schemas.shared import ErrorDetail


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/reload``. settings: those of the engine that become others, by name, as in the section ``[engine]``
    of a file; the rest stays. Without any its files are read again. model: one of the server's, the first one unless it
    has several. stream: tell what goes on, a line of JSON each, the last one as the answer without it or an error.
    """

    settings: dict[str, Any] = {}
    model: str | None = None
    stream: bool | None = None


class Reloading(msgspec.Struct, kw_only=True):
    """What goes on. share: how much of it is done (0 to 1), null if nobody knows."""

    status: Literal["loading"] = "loading"
    phase: str
    share: float | None


class Reloaded(msgspec.Struct, kw_only=True):
    """Another engine serves. moved: requests that were running and go on in it. seconds: until it was ready."""

    status: Literal["replaced"] = "replaced"
    model: str
    moved: int
    seconds: float


class ReloadError(msgspec.Struct, kw_only=True):
    """The last line of a stream, if the engine before serves on."""

    status: Literal["error"] = "error"
    error: ErrorDetail
