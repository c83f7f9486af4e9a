"""How often whoever looks things up is asked: at every step, unless that takes long beside one and finds nothing.

Looking takes some tenths of a millisecond, whatever the target is: nothing beside a step of 10 ms, and a fifth of one
of 0.5. So where a few looks in a row brought nothing, the next ones come after 1, 2, 4, .. steps without; never more
seldom than the share of the time that looking in vain may take asks for. Where something that was found is right, and
where another text begins, it begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Of the time, the share that looking in vain may take; so many looks in vain are spared; how far one step moves what
#: is known of its share.
_SHARE, _SPARED, _MOVED = 0.02, 4, 1 / 16


class Looks:
    """Says whether the next step is one to look in."""

    def __init__(self) -> None:
        self.now = True
        self._share = 0.0
        self._vain = self._left = 0

    def due(self) -> bool:
        """Whether to look in the step that is planned."""
        self.now = self._left <= 0
        self._left -= 1
        return self.now

    def saw(self, seconds: Mapping[str, float], right: bool) -> None:
        """What a step took, by its phases, and whether something that was found and drafted was right."""
        if self.now:
            self._share += _MOVED * (seconds.get("plan", 0.0) / sum(seconds.values()) - self._share)
            self._vain = 0 if right else self._vain + 1
            self._left = min(1 << min(self._vain, 16) >> _SPARED, int(self._share / _SHARE))

    def begin(self) -> None:
        """Another text is written now."""
        self._vain = self._left = 0
