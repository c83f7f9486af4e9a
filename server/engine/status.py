"""What is known of the engine process, and what clients are told while it takes no requests."""

from __future__ import annotations

from typing import Literal

import msgspec

from server.schemas.errors import Unavailable

State = Literal["loading", "ready", "down", "failed", "unloaded"]
#: Why an engine is started again: it ended by itself or was killed, it hung, there was no starting it, or it was
#: replaced on purpose.
Cause = Literal["died", "hung", "not_started", "replaced"]


class EngineStatus(msgspec.Struct, frozen=True):
    """What is known of the engine now. message, share: how far loading is. starts: engine processes started so far.
    cause: why it is about to be started again, or was just now; None if it is not. resumed: requests of the engine
    before that go on in one that is ready. Unloaded: there is no process, and should be none."""

    state: State
    message: str = ""
    share: float | None = None
    starts: int = 0
    cause: Cause | None = None
    resumed: int = 0


def unavailable(status: EngineStatus) -> Unavailable:
    """The 503 that says what the engine is doing instead."""
    if status.state == "loading":
        share = "" if status.share is None else f" ({status.share:.0%})"
        return Unavailable(f"Loading model: {status.message}{share}", "loading")
    if status.state == "unloaded":
        return Unavailable("The model is not loaded", "unloaded")
    return Unavailable(f"The engine is down: {status.message}", "engine_down")
