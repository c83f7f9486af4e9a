"""Who drafts most of the time, told when that changes and not at every step."""

from __future__ import annotations

from spec.budget.mixed import Why
from spec.trace import NOT_PAYING

#: What one step counts among the last ones, and by how much a new leader must be ahead.
_STEP, _AHEAD = 1 / 64, 0.2


class Leader:
    """name: of who leads; "" before anybody does. news: why another one leads since the last step; "" mostly."""

    def __init__(self) -> None:
        self.name, self.news = "", ""
        self._shares: dict[str, float] = {}

    def see(self, why: Why) -> None:
        """What a step does."""
        choice, self.news = why.choice, ""
        for name in self._shares:
            self._shares[name] *= 1 - _STEP
        self._shares[choice] = share = self._shares.get(choice, 0.0) + _STEP
        if choice != self.name and not why.probe and share > self._shares.get(self.name, 0.0) + _AHEAD:
            self.name, self.news = choice, told(why)


def told(why: Why) -> str:
    """The reason in words."""
    chosen, *others = why.weighed
    against = "; ".join(map(str, others)) or "nobody has anything to propose"
    if not chosen.drafter:
        return f"{NOT_PAYING}: {chosen}; {against}" if others else f"no draft: {against}"
    return f"{chosen}; {against}"
