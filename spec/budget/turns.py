"""How often something is done that takes time and may bring nothing."""

from __future__ import annotations

#: How far one time moves the average of what it takes, a shorter one (the first is slow), and of what it brings.
_MOVED, _SHORTER = 1 / 16, 1 / 4
#: How much more of the time it may take at the beginning of a text.
_SOONER = 10.0


class Turns:
    """The steps in which it is done: where it brings more than it takes, all; else ever fewer, until it takes ``share``
    of the time. With another text it begins again, unless that alone would take much of the time.

    now: whether it is done in the step that is planned. part: the time it takes, over that of a step's rest.
    """

    def __init__(self, share: float) -> None:
        self.now, self.part, self._share = True, 0.0, share
        self._wait = self._left = self._brings = 0.0

    def due(self) -> bool:
        """Whether to do it in the step that is planned."""
        self._left -= 1.0
        self.now = self._left < 0.0 or self._brings > self.part
        return self.now

    def took(self, seconds: float, rest: float, brought: float = 0.0) -> None:
        """Learn from a step in which it was done. seconds, rest: that it took, and all else. brought: the steps that it
        spared."""
        part = seconds / max(rest, 1e-9)
        self.part = self.part or part
        self.part += (_MOVED if part > self.part else _SHORTER) * (part - self.part)
        self._brings += _MOVED * (brought - self._brings)
        self._left = self._wait = min(2.0 * self._wait + 0.5, self.part / self._share)

    def begin(self) -> None:
        """Do it soon, and soon again."""
        self._wait = self.part / (_SOONER * self._share)
        self._left = min(self._left, self._wait)
