"""Who drafts most of the time, told when that changes and not at every step."""

from __future__ import annotations

from spec.budget.mixed import Why
from spec.names import NONE
from spec.trace import NOT_PAYING

#: What one step counts among the last ones, and by how much a new leader must be ahead.
_STEP, _AHEAD = 1 / 64, 0.2


class Leader:
    """name: of who leads; "" before anybody does. news: why another one leads since the last step; "" mostly."""

    def __init__(self) -> None:
        self.name, self.news = "", ""
        self._last = NONE
        self._shares: dict[str, float] = {}

    def see(self, why: Why, repeated: int = 0) -> None:
        """What a step does. repeated: steps before it of which nothing was said, since they did what the one before
        them did."""
        if repeated:
            self._count(self._last, 1 - (1 - _STEP) ** repeated)
        self._last = choice = why.choice
        self.news = ""
        share = self._count(choice, _STEP)
        if choice != self.name and not why.probe and share > self._shares.get(self.name, 0.0) + _AHEAD:
            self.name, self.news = choice, told(why)

    def _count(self, choice: str, step: float) -> float:
        """The share of a choice, with what it did in the last steps."""
        for name in self._shares:
            self._shares[name] *= 1 - step
        self._shares[choice] = share = self._shares.get(choice, 0.0) + step
        return share


def told(why: Why) -> str:
    """The reason in words."""
    chosen, *others = why.weighed
    against = "; ".join(map(str, others)) or "nobody has anything to propose"
    if chosen.drafter == NONE:
        return f"{NOT_PAYING}: {chosen}; {against}" if others else f"{NONE}: {against}"
    return f"{chosen}; {against}"
