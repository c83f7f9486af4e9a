"""How often what mostly brings nothing is tried all the same, to see whether that still holds."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from spec.budget.weigh import Taken

#: The share of the time that may be lost by asking models in vain, and that looking in vain may take.
PROBING, LOOKING = 0.003, 0.02
#: So many looks in vain are spared.
_SPARED = 4.0


class Probes:
    """Owns what is saved up for each model, by its name: what an ask is expected to lose is saved beforehand, so the
    dearer it is (a model that has long rested has much to catch up with), the more seldom."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def due(self, ways: Many[Taken], pace: float, reading: Mapping[str, float], behind: Mapping[str, float]) -> Taken:
        """What to do in the place of the best way, which is the first, if enough is saved up for any; otherwise that.

        pace: tokens in a second that time is worth. reading: seconds that catching up with what this step writes will
        take each model, which is paid beside, up to as much again: else what has to be read might grow as fast as what
        is saved. behind: seconds of catching up that are not in a model's way.
        """
        best = ways[0]
        allowed = PROBING * best.seconds
        for way in ways[1:]:
            if way.model and way.model != best.model and way.kind[1] == best.kind[1]:
                self._saved[way.model] = self._saved.get(way.model, 0.0) + allowed + min(allowed, reading[way.model])
                lost = max(way.seconds - best.seconds, (best.worth - way.worth) / pace)  # as if it brought nothing
                if self._saved[way.model] >= lost + behind[way.model]:
                    self._saved[way.model] = 0.0
                    return way
        return best


class Looks:
    """Whether to look things up in the next step. That and planning take a tenth of a millisecond or two: nothing
    beside a step of 10 ms, and a fifth of one of 0.5. So it is done while some looks are left; one in vain takes one,
    and each step adds as much of one as its share of the time allows for. now: whether it was done in the last step."""

    def __init__(self) -> None:
        self.now, self._left, self._added = True, _SPARED, 1.0

    def due(self) -> bool:
        """Whether to look in the step that is planned."""
        self.now = self._left >= 1.0
        return self.now

    def saw(self, seconds: Mapping[str, float], right: bool) -> None:
        """What a step took, by its phases, and whether something that was found and drafted was right."""
        planning = seconds.get("plan", 0.0)
        if self.now and planning:
            self._added = LOOKING * (sum(seconds.values()) - planning) / planning
        self._left = _SPARED if right else min(self._left - self.now + self._added, _SPARED)

    def begin(self) -> None:
        """Another text is written now."""
        self._left = _SPARED
