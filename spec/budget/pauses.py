"""How often something is done that takes time and may bring nothing."""

from __future__ import annotations

#: The share of the time that it may take where models draft, and where nothing is drafted.
DRAFTING, NOTHING_DRAFTED = 0.005, 0.002
#: How far one time moves the average of what it takes, and a shorter one: the first is slow. Times in vain in a row
#: that have no effect where it pays on average.
_MOVED, _SHORTER, _SPARED = 1 / 16, 1 / 4, 4


class Intervals:
    """The steps in which it is done. After it brought less than it took, the wait for the next time doubles, up to the
    share of the time that it may take; where it pays on average there is none, and with another text it begins again.

    now: whether it is done in the step that is planned. part: the time it takes, over that of a step's rest.
    """

    def __init__(self) -> None:
        self.now, self.part = True, 0.0
        self._brought = 0.0
        self._wait = self._left = self._vain = 0

    def due(self) -> bool:
        """Whether to do it in the step that is planned."""
        self.now, self._left = self._left <= 0, self._left - 1
        return self.now

    def took(self, seconds: float, rest: float, brought: float, share: float) -> None:
        """Learn from a step in which it was done. seconds, rest: that it took, and all else. brought: the steps that it
        spared. share: of the time that it may take."""
        part = seconds / max(rest, 1e-9)
        self.part = self.part or part
        self.part += (_MOVED if part > self.part else _SHORTER) * (part - self.part)
        self._brought += _MOVED * (brought - self._brought)
        self._vain = 0 if brought > self.part else self._vain + 1
        waits = self._vain > (0 if self._brought <= self.part else _SPARED)
        self._left = self._wait = min(2 * self._wait + 1, int(self.part / share)) if waits else 0

    def begin(self) -> None:
        """Do it in the next step."""
        self._left = self._wait = self._vain = 0
