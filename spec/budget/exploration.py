"""How often what mostly brings nothing is tried, to see whether that still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foresay.spec.budget.weigh import CandidatePlan

#: The share of the time that may be lost by drafting with models in vain, by choosing in vain, where nothing is drafted
#: and where a model drafts, and by choosing more often while a text is new.
PROBING, CHOOSING, DRAFTING, BEGINNING = 0.003, 0.002, 0.01, 0.003
#: A try that took longer than so many times its expectation was delayed by something else.
_MOST_OVER = 4.0
#: How many choices in vain reach the limit; how many in a row have no effect where choices pay on average; how far one
#: step moves the averages of what choosing takes and brings.
_VAIN, _SPARED, _MOVED = 10, 4, 1 / 16
#: How many times what a choice takes may be lost by the drafts it chose.
_LOST = 4.0


class Exploration:
    """The savings of each model, by its name: the expected loss of a try is saved beforehand, so the dearer a try is (a
    model that rested for long has much to catch up with), the rarer."""

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
        """The plan to try instead of the best, which is the first, if enough is saved for any; otherwise the best.

        pace: tokens a second, the worth of time. reading: each model's seconds to catch up with what this step writes,
        which are saved in addition, up to as much again: otherwise the unread text might grow as fast as the savings.
        behind: seconds of catching up that a model's plan does not include. steps: since the last call.
        """
        best = ways[0]
        allowed = PROBING * best.seconds * steps
        # The best of each model; for the best plan's own model, its trees if that plan is chains, or the reverse.
        others = {way.model: way for way in reversed(ways[1:]) if way.model and way.kind[1] == best.kind[1]}
        for model, way in reversed(others.items()):
            more = min(allowed, reading[model] * steps) if model != best.model else 0.0
            self._saved[model] = self._saved.get(model, 0.0) + allowed + more
            lost = max(way.seconds - best.seconds, (best.worth - way.worth) / pace)  # as if it brought nothing
            if self._saved[model] >= lost + behind[model]:
                self._saved[model] = 0.0
                return way
        return best

    def took(self, model: str, seconds: float, expected: float) -> None:
        """What a try took beyond what was expected is saved before the next: of a model that rested, code and weights
        are out of the caches."""
        self._saved[model] = self._saved.get(model, 0.0) - min(max(0.0, seconds - expected), _MOST_OVER * expected)


class Looks:
    """Whether to look things up and choose anew in the next step, or to repeat the last choice. Choosing takes one or
    two tenths of a millisecond for each sequence: nothing next to a step of 40 ms, but most of one of 0.2. So the more
    looks in a row brought less than they took, the longer it is to the next, up to the limit on time spent choosing in
    vain. This starts over where looking pays, and where another text begins, unless too much time was spent at the
    beginnings of earlier ones. share: the time of choosing, over all else in a step."""

    def __init__(self) -> None:
        self.now = True
        self.share = self._brought = self._saved = 0.0  # saved: steps
        self._gained = self._took = 0.0  # seconds: by drafts since the last choice, and what that took
        self._vain = self._left = 0
        self._drafts = False

    def due(self) -> bool:
        """Whether to choose in the step that is planned."""
        self.now = self._left <= 0
        self._left -= 1
        self._saved += CHOOSING + BEGINNING
        return self.now

    def saw(self, seconds: Mapping[str, float], right: float, drafts: bool = False) -> None:
        """Learn from a step with a choice. seconds: by its phases. right: tokens that were found and accepted, per
        sequence, less what verifying found nodes took: about as many steps were saved. drafts: whether a model does."""
        chosen = seconds.get("plan", 0.0)
        share = chosen / max(sum(seconds.values()) - chosen, 1e-9)
        self._gained, self._took = 0.0, chosen
        self.share += _MOVED * (share - self.share)
        self._brought += _MOVED * (right - self._brought)
        if drafts != self._drafts:  # a change may be an error, so it is looked at sooner
            self._drafts, self._vain = drafts, self._vain // 2
        pays = self._brought >= self.share
        vain = right <= 0.0 or not pays
        self._vain, self._saved = (self._vain + 1, min(self._saved, 1.0) - share) if vain else (0, 1.0)
        counted = max(0, self._vain - _SPARED) if pays else self._vain
        self._left = int(self.share / (DRAFTING if drafts else CHOOSING) * min(counted / _VAIN, 1.0))

    def gained(self, seconds: float) -> None:
        """Learn what a step with drafts that were chosen before gained over plain steps: once a few choices' time is
        lost, it is chosen anew."""
        self._gained = min(0.0, self._gained + seconds)
        if self._gained < -_LOST * self._took:
            self._left = 0

    def begin(self) -> None:
        """Another text begins."""
        if self._saved >= 0.0:
            self._vain = self._left = 0
