"""The counters, sampled once a second: of the last minutes by second, and of the last hour by minute.

::

    counters ── a second is over ──> seconds: (second, counters at its end) ──> points
                                └──> minutes: the same, by minute

What was counted in any span is the difference of the counters at its ends. A second in which nothing is counted has no
sample. A sample is taken by what is counted next, or read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from foresay.server.metrics import fields
from foresay.server.metrics.counters import Counters
from foresay.server.metrics.report import Point

#: Seconds and minutes of the charts; samples of seconds that are kept, of which the figures of a minute are made.
SECONDS, MINUTES, KEPT = 600, 60, 120


class Samples:
    """Counters at the ends of spans of one length, in seconds, each with its beginning; and points of these spans."""

    def __init__(self, length: int, kept: int, points: int) -> None:
        self.length = length
        self._ends = deque([(-length, Counters())], kept)
        self._points: deque[tuple[int, msgspec.Raw]] = deque(maxlen=points)

    def take(self, second: int, counters: Counters) -> None:
        """The counters at the end of a second, the last one so far of its span."""
        begin = second - second % self.length
        if self._ends[-1][0] == begin:
            self._ends.pop()
        elif len(self._ends) > 1:
            self._points.append(self._point())
        self._ends.append((begin, counters))

    def before(self, second: int) -> Counters:
        """The counters at the end of the last span that began before a second; else the first that are kept."""
        return next((at for begin, at in reversed(self._ends) if begin < second), self._ends[0][1])

    def points(self, begin: int) -> list[tuple[int, msgspec.Raw]]:
        """The spans that begin from ``begin`` on, each as the JSON of its point; the last one may go on."""
        last = [self._point()] if len(self._ends) > 1 else []
        return [point for point in (*self._points, *last) if point[0] >= begin]

    def _point(self) -> tuple[int, msgspec.Raw]:
        """Of the last span. It is encoded once, since a span that is over no longer changes."""
        (_, before), (begin, after) = self._ends[-2], self._ends[-1]
        point = Point.of(fields.since(after, before), begin, self.length)
        return begin, msgspec.Raw(msgspec.json.encode(point))


class Ring:
    """All counters of one model. ``now`` is always in seconds since 1970 and does not run backwards, as is ``clock``.

    delivered: the time up to which delivery is counted: when the latest step arrived, or its latest text was passed on.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock, self.delivered = clock, 0.0
        self._counters, self._second, self._counted = Counters(), 0, False
        self._seconds, self._minutes = Samples(1, KEPT, SECONDS), Samples(60, MINUTES + 2, MINUTES + 1)

    def at(self, now: float) -> Counters:
        """The counters, to count into at this moment."""
        if (second := int(now)) != self._second:
            self._sample(second)
        self._counted = True
        return self._counters

    def total(self) -> Counters:
        """Everything since the start."""
        return fields.kept(self._counters)

    def since(self, begin: int) -> Counters:
        """What was counted from second ``begin`` on, of the last two minutes."""
        return fields.since(self._counters, self._before(begin))

    def between(self, begin: int, end: int) -> Counters:
        """The same up to, but not including, second ``end``."""
        return fields.since(self._before(end), self._before(begin))

    def hour(self, now: float) -> Counters:
        """What was counted in the last hour, from a full minute on."""
        self._sample(int(now))
        begin = int(now) - 60 * MINUTES
        return fields.since(self._counters, self._minutes.before(begin - begin % 60))

    def seconds(self, now: float, begin: int = 0) -> list[tuple[int, msgspec.Raw]]:
        """The finished seconds of the last ten minutes, from ``begin`` on, as points."""
        self._sample(int(now))
        return self._seconds.points(max(begin, int(now) - SECONDS))

    def minutes(self, now: float) -> list[tuple[int, msgspec.Raw]]:
        """The minutes of the last hour as points; the current one has its finished seconds."""
        self._sample(int(now))
        return self._minutes.points(int(now) - 60 * (MINUTES + 1) + 1)

    def _before(self, second: int) -> Counters:
        return self._counters if self._second < second else self._seconds.before(second)

    def _sample(self, now: int) -> None:
        """Take a sample of the current second, if it is over and anything was counted."""
        if now != self._second:
            if self._counted:
                sample = fields.kept(self._counters)
                self._seconds.take(self._second, sample)
                self._minutes.take(self._second, sample)
            self._second, self._counted = now, False
