"""The last ten minutes by second and the last hour by minute; spans without activity have no window.

::

    running second ── over ──> seconds, tens of seconds (10 min) ──> forgotten
                         ├──> minutes, tens of minutes (1 h) ──────> forgotten
                         └──> total: since the start

The tens make sums cheap: a minute or an hour up to now is a few long spans plus some short ones before them.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf

from foresay.server.observe.telemetry.window import Window

SECONDS = 600
MINUTES = 60


class Rollup:
    """Windows of one length, each beginning at a multiple of it; the oldest first. keep: for how many seconds."""

    def __init__(self, length: int, keep: int) -> None:
        self.length = length
        self._keep = keep
        self._windows: deque[Window] = deque()

    def add(self, second: Window) -> None:
        """Add a finished second; they come in order."""
        begin = second.second - second.second % self.length
        windows = self._windows
        if not windows or windows[-1].second != begin:
            windows.append(Window(begin))
        windows[-1].add(second)
        while windows[0].second < second.second - self._keep:
            windows.popleft()

    def stepped(self) -> int | None:
        """The beginning of the last window in which the engine stepped; None if there is none."""
        return next((window.second for window in reversed(self._windows) if window.steps), None)

    def between(self, begin: float, end: float = inf) -> list[Window]:
        """The windows that begin at or after ``begin`` and before ``end``."""
        found = []
        for window in reversed(self._windows):
            if window.second < begin:
                break
            if window.second < end:
                found.append(window)
        found.reverse()
        return found


class TimeSeries:
    """Counts over time. ``now`` is always in seconds since 1970 and does not run backwards."""

    def __init__(self) -> None:
        self.running = Window()
        self._empty = True
        self._seconds, self._minutes = Rollup(1, SECONDS), Rollup(60, 60 * (MINUTES + 1))
        self._levels = (self._seconds, Rollup(10, SECONDS), self._minutes, Rollup(600, 60 * (MINUTES + 1)))
        self._total = Window()

    def at(self, now: float) -> Window:
        """The window of this second, to count into."""
        second = int(now)
        if second != self.running.second:
            self._close(second)
        self._empty = False
        return self.running

    def total(self) -> Window:
        """Everything since the start, including the current second."""
        total = Window()
        total.add(self._total)
        total.add(self.running)
        return total

    def stepped(self, now: float) -> int:
        """The last second in which the engine stepped; the current one if there is none."""
        if self.running.steps:
            return self.running.second
        return self._seconds.stepped() or int(now)

    def since(self, second: int) -> list[Window]:
        """The seconds from ``second`` on, including the current one, oldest first."""
        found = self._seconds.between(second)
        return [*found, self.running.settle()] if not self._empty and self.running.second >= second else found

    def seconds(self, now: float) -> list[Window]:
        """The finished seconds of the last ten minutes."""
        return [window for window in self.since(int(now) - SECONDS) if window.second < int(now)]

    def minutes(self, now: float) -> list[Window]:
        """The minutes of the last hour; the current one includes its finished seconds."""
        self._settle(now)
        return self._minutes.between(int(now) - 60 * (MINUTES + 1) + 1)

    def window(self, now: float, seconds: int) -> Window:
        """What was counted in the last ``seconds``, at most ten minutes, including the current one."""
        begin = int(now) - seconds + 1
        total = self._over(begin)
        if not self._empty and self.running.second >= begin:
            total.add(self.running)
        return total

    def hour(self, now: float) -> Window:
        """What was counted in the finished seconds of the last hour."""
        self._settle(now)
        begin = int(now) - 60 * MINUTES
        return self._over(begin - begin % 60)

    def _over(self, begin: int) -> Window:
        """The sum of everything finished from second ``begin`` on: short spans until a longer one begins, and so on."""
        total = Window(begin)
        for level, longer in pairwise(self._levels):
            end = -(-begin // longer.length) * longer.length
            for window in level.between(begin, end):
                total.add(window)
            begin = end
        for window in longer.between(begin):
            total.add(window)
        return total

    def _settle(self, now: float) -> None:
        """Store the current window if its second is over."""
        if self.running.second < int(now):
            self._close(int(now))

    def _close(self, second: int) -> None:
        """Store the current window and start one for ``second``."""
        over, self.running = self.running, Window(second)
        if self._empty:
            return
        self._empty = True
        self._total.add(over)
        for level in self._levels:
            level.add(over)
