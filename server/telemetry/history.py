"""The last ten minutes second by second and the last hour minute by minute; seconds without any activity have no tally.

::

    running second ── over ──> seconds (10 min) ──────────────> forgotten
                         └──> minutes (1 h): one tally a minute, added to while it runs
                         └──> total: since the start
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from server.telemetry.tally import Tally, summed

SECONDS = 600
MINUTES = 60


class History:
    """Tallies in time. ``now`` everywhere is in seconds since 1970 and does not run backwards."""

    def __init__(self) -> None:
        self.running = Tally()
        self._empty = True
        self._seconds: deque[Tally] = deque()
        self._minutes: deque[Tally] = deque()
        self._total = Tally()

    def at(self, now: float) -> Tally:
        """The tally of this second, to be written to."""
        second = int(now)
        if second != self.running.second:
            self._close(second)
        self._empty = False
        return self.running

    def total(self) -> Tally:
        """Everything since the start, the running second included."""
        total = Tally()
        total.add(self._total)
        total.add(self.running)
        return total

    def since(self, second: int) -> list[Tally]:
        """The seconds from ``second`` on, the running one included, oldest first."""
        found = []
        for tally in reversed(self._seconds):
            if tally.second < second:
                break
            found.append(tally)
        found.reverse()
        return [*found, self.running.settle()] if not self._empty and self.running.second >= second else found

    def seconds(self, now: float) -> list[Tally]:
        """The seconds of the last ten minutes that are over."""
        return [tally for tally in self.since(int(now) - SECONDS) if tally.second < int(now)]

    def minutes(self, now: float) -> list[Tally]:
        """The minutes of the last hour, the running one as far as its seconds are over."""
        if self.running.second < int(now):
            self._close(int(now))
        return [tally for tally in self._minutes if tally.second > now - 60 * (MINUTES + 1)]

    def window(self, now: float, seconds: int) -> Tally:
        """What was counted in the last ``seconds``, the running one included."""
        return summed(self.since(int(now) - seconds + 1))

    def hour(self, now: float) -> Tally:
        """What was counted in the last hour, as far as its seconds are over."""
        return summed(self.minutes(now))

    def _close(self, second: int) -> None:
        """Put the running tally where it belongs and begin one for ``second``."""
        over, self.running = self.running, Tally(second)
        if self._empty:
            return
        self._empty = True
        self._seconds.append(over)
        self._total.add(over)
        minute = over.second - over.second % 60
        if not self._minutes or self._minutes[-1].second != minute:
            self._minutes.append(Tally(minute))
        self._minutes[-1].add(over)
        _forget(self._seconds, second - SECONDS)
        _forget(self._minutes, second - 60 * (MINUTES + 1))


def _forget(tallies: deque[Tally], before: int) -> None:
    while tallies and tallies[0].second < before:
        tallies.popleft()


def busy_seconds(tallies: Iterable[Tally]) -> int:
    """Seconds in which the engine stepped."""
    return sum(1 for tally in tallies if tally.steps)
