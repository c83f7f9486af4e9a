"""How often what mostly brings nothing is tried all the same, to see whether that still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foresay.spec.budget.weigh import CandidatePlan

#: The share of the time that may be lost by asking models in vain, by choosing in vain, and by doing that more often
#: while a text is new.
PROBING, CHOOSING, BEGINNING = 0.003, 0.01, 0.01
#: So many choices in vain are spared; how far one step moves what is known of what they take and bring.
_SPARED, _MOVED = 4, 1 / 16


class Exploration:
    """Owns what is saved up for each model, by its name: what an ask is expected to lose is saved beforehand, so the
    dearer it is (a model that has long rested has much to catch up with), the more seldom."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def due(
        self,
        ways: Sequence[CandidatePlan],
        pace: float,
        reading: Mapping[str, float],
        behind: Mapping[str, float],
        steps: int = 1,
    ) -> CandidatePlan:
        """What to do in the place of the best way, which is the first, if enough is saved up for any; otherwise that.

        pace: tokens in a second that time is worth. reading: seconds that catching up with what this step writes will
        take each model, which is paid beside, up to as much again: else what has to be read might grow as fast as what
        is saved. behind: seconds of catching up that are not in a model's way. steps: since this was asked last.
        """
        best = ways[0]
        allowed = PROBING * best.seconds * steps
        # Of each model its best; of the best way's own, its trees if those are chains, or the other way round.
        others = {way.model: way for way in reversed(ways[1:]) if way.model and way.kind[1] == best.kind[1]}
        for model, way in reversed(others.items()):
            more = min(allowed, reading[model] * steps) if model != best.model else 0.0
            self._saved[model] = self._saved.get(model, 0.0) + allowed + more
            lost = max(way.seconds - best.seconds, (best.worth - way.worth) / pace)  # as if it brought nothing
            if self._saved[model] >= lost + behind[model]:
                self._saved[model] = 0.0
                return way
        return best


class Looks:
    """Whether to look things up and choose anew in the next step, or to do what was chosen last. Choosing takes a tenth
    of a millisecond or two: nothing beside a step of 10 ms, and most of one of 0.2. So where a few looks in a row
    brought less than they took, the next ones come after 1, 2, 4, .. steps, as seldom as the share of the time that
    choosing in vain may take asks for. Where looking pays it begins anew, and where another text begins, unless too
    much time went into the beginnings of those before. share: what choosing takes, over all else in a step."""

    def __init__(self) -> None:
        self.now = True
        self.share = self._brought = self._saved = 0.0  # saved: steps
        self._vain = self._left = 0

    def due(self) -> bool:
        """Whether to choose in the step that is planned."""
        self.now = self._left <= 0
        self._left -= 1
        self._saved = min(self._saved + CHOOSING + BEGINNING, 1.0)
        return self.now

    def saw(self, seconds: Mapping[str, float], right: float) -> None:
        """What a step took in which it was chosen, by its phases, and how many tokens of each sequence were found and
        right: about as many steps were saved."""
        chosen = seconds.get("plan", 0.0)
        share = chosen / max(sum(seconds.values()) - chosen, 1e-9)
        self.share += _MOVED * (share - self.share)
        self._brought += _MOVED * (right - self._brought)
        vain = not right or self._brought < self.share
        self._vain, self._saved = (self._vain + 1, self._saved - share) if vain else (0, 1.0)
        self._left = min(1 << min(self._vain, 16) >> _SPARED, int(self.share / CHOOSING))

    def begin(self) -> None:
        """Another text is written now."""
        if self._saved >= 0.0:
            self._vain = self._left = 0
