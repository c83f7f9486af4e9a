"""How many threads run best beside whatever else the machine does.

A list is walked when its slowest thread has walked it, so a thread that waits for a core holds up all others, and
fewer threads are faster than some that wait. Linux counts for every thread how long it could run and did not (run
delay: proc(5), ``/proc/PID/task/TID/schedstat``); where it does not say, all threads are always used. A row's bits do
not depend on how many there are, so they may change between two lists.

::

    all ──a look finds cores missing──> so many fewer ──patience is over──> all, for a short look ──> ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: Seconds between looks while all threads run, and from when all are tried again until the look that follows.
_LOOK, _TRIAL = 0.25, 0.05
#: Seconds until all are tried again: at first, and at most, since each trial in vain doubles them.
_PATIENCE, _MOST_PATIENCE = 1.0, 16.0
#: A part of a core that may be missing before a thread less is used, and the least time that tells anything (seconds).
_SPARED, _LEAST = 0.3, 0.01

#: (thread ids) -> seconds they ran, and seconds they waited for a core, since they began.
Read = Callable[[Iterable[int]], tuple[float, float]]


def ran_and_waited(threads: Iterable[int]) -> tuple[float, float]:
    """Of these threads together, as Linux counts it; (0, 0) where nobody does."""
    ran = waited = 0
    for thread in threads:
        try:
            fields = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        except OSError:
            continue
        ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


class Crowding:
    """Says how many of ``most`` threads to use now. share: of the time in which threads could have run when all were
    tried last, the part they waited for a core."""

    def __init__(self, most: int, read: Read = ran_and_waited, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = self.count = most
        self.share = 0.0
        self._read, self._clock = read, clock
        self._patience = _PATIENCE
        self._due = clock() + _LOOK
        self._seen: tuple[float, float] | None = None

    def look(self, threads: Callable[[], Iterable[int]]) -> int:
        """To be asked before every list, by the thread that calls: how many threads walk it. threads: tells the ids of
        those that walked the one before."""
        now = self._clock()
        if self.count == self.most and self._seen is None:
            self._seen = self._read(threads())
        elif now >= self._due and self.count < self.most:
            self.count, self._seen, self._due = self.most, None, now + _TRIAL
        elif now >= self._due:
            self._judge(self._read(threads()), now)
        return self.count

    def _judge(self, seen: tuple[float, float], now: float) -> None:
        """After a while of all threads."""
        ran, waited = (later - before for later, before in zip(seen, self._seen or seen, strict=True))
        self._seen, self._due = seen, now + _LOOK
        if ran + waited < _LEAST:
            return
        self.share = waited / (ran + waited)
        missing = self.share * self.most
        if missing > _SPARED and self.most > 1:
            self.count = max(1, self.most - max(1, round(missing)))
            self._due, self._patience = now + self._patience, min(2 * self._patience, _MOST_PATIENCE)
        else:
            self._patience = _PATIENCE
