"""What the engine process went through: the phases of its last start, and how often it was started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from server.engine.status import Cause, EngineStatus


class Startup:
    """Follows the engine's status. seconds: by phase of the last start, ``total`` included once it is ready. restarts:
    how often the engine process was started again, by what had become of the one before. resumed: how often a request
    went on in another engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.restarts: dict[str, int] = dict.fromkeys(get_args(Cause), 0)
        self.resumed = 0
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase = ""
        self._phase_began = self._began = clock()
        self._starts = 0

    def see(self, status: EngineStatus) -> None:
        """The engine is in another state."""
        now = self._clock()
        if status.cause is not None:
            self.restarts[status.cause] += 1
        self.resumed += status.resumed
        if status.starts != self._starts:
            self._starts, self._began, self._phase, self.seconds = status.starts, now, "", {}
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._phase_began
        if status.state == "ready" and self._phase:
            self.seconds["total"] = now - self._began
        self._phase = status.message.replace(" ", "_") if status.state == "loading" else ""
        self._phase_began = now
