"""Tells an engine process that hangs from one that works long.

It shows life by frames (between two steps it answers a Ping) and by the CPU time it uses: stopped or deadlocked it does
neither, in a long step the second alone. Time is what the watchdog itself was awake for, so that a machine that was
suspended, or a server that was stopped, is no reason to kill anything.
"""

from __future__ import annotations

#: The looks that make up the timeout.
LOOKS = 6
#: Times the timeout, for what may be slow by right: a prompt's chunk through a large model on two cores takes minutes,
#: and a loader waits for disks and networks.
PATIENCE = 20


class Watchdog:
    """Asked every ``interval`` seconds. timeout: seconds that a ready engine may show no life at all."""

    def __init__(self, timeout: float) -> None:
        self.interval = timeout / LOOKS
        self._timeout = timeout
        self._ticks = self._idle = self._silent = 0

    def look(self, heard: bool, ticks: int, loading: bool) -> str | None:
        """Why the engine is given up; None if it is not.

        heard: whether bytes came since the last look. ticks: CPU time it has used so far. loading: it answers nothing
        then, so that only one that stands still is given up.
        """
        self._silent = 0 if heard else self._silent + 1
        self._idle = 0 if heard or ticks != self._ticks else self._idle + 1
        self._ticks = ticks
        long = LOOKS * PATIENCE
        if self._idle >= (long if loading else LOOKS):
            return f"the engine process hung (no sign of life for {self._idle * self.interval:g} s)"
        if self._silent >= long and not loading:
            return f"the engine process hung (busy, but no answer for {self._silent * self.interval:g} s)"
        return None
