"""How often what mostly brings nothing is tried, to see whether that still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foresay.spec.budget.weigh import CandidatePlan

#: The share of the time that may be lost by drafting with models in vain; by choosing in vain where nothing is drafted,
#: and where a model drafts or there are only lookups; and by choosing more often while a text is new.
PROBING, CHOOSING, DRAFTING, BEGINNING = 0.003, 0.002, 0.01, 0.003
#: A try that took longer than so many times its expectation was delayed by something else.
_MOST_OVER = 4.0
#: How far one choice moves the averages of what choosing takes and brings, and a cheaper one that of what it takes, as
#: the first is slow; how many choices in vain in a row have no effect where choices pay on average; after how many
#: steps a choice also reads what was written meanwhile.
_MOVED, _CHEAPER, _SPARED, _SOON = 1 / 16, 1 / 4, 4, 4


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
    """Whether to look things up and choose anew in the next step, or to repeat the last choice. Choosing takes some
    tenths of a millisecond: nothing next to a step of 40 ms, but most of one of 0.2. So after a choice that brought
    less than it took the wait for the next doubles, up to the limit on time spent choosing in vain. It starts over
    where choosing pays, and where another text begins, unless too much time was spent at the beginnings of earlier
    ones. share: the time of choosing, over all else in a step."""

    def __init__(self) -> None:
        self.now, self.share = True, 0.0
        self._brought = self._saved = 0.0  # tokens; steps
        self._vain = self._left = 0
        self._since = 1  # steps since the last choice

    def due(self) -> bool:
        """Whether to choose in the step that is planned."""
        self._since = 1 if self.now else self._since + 1
        self.now, self._left = self._left <= 0, self._left - 1
        self._saved += CHOOSING + BEGINNING
        return self.now

    def saw(self, chosen: float, rest: float, right: float, drafts: bool = False, alone: bool = False) -> None:
        """Learn from a step with a choice. chosen, rest: seconds of choosing, and of all else. right: tokens that were
        found and accepted, per sequence, less what verifying found nodes took: about as many steps were saved. drafts:
        whether a model drafts. alone: whether there are only lookups."""
        share = chosen / max(rest, 1e-9)
        # A late choice takes longer, as it reads what was written meanwhile; that is no reason to be later still.
        dearer = max(0.0, share * min(1.0, _SOON / self._since) - self.share)
        self.share = self.share or share
        self.share += _MOVED * dearer if share > self.share else _CHEAPER * (share - self.share)
        self._brought += _MOVED * (right - self._brought)
        vain = right <= share
        self._vain, self._saved = (self._vain + 1, min(self._saved, 1.0) - share) if vain else (0, 1.0)
        spared = self._brought >= self.share and self._vain <= _SPARED
        most = max(0.0, self.share / (DRAFTING if drafts or alone else CHOOSING) - 1.0)
        self._left = 0 if spared else int(min(2.0 ** min(self._vain, 64) - 1.0, most))

    def begin(self) -> None:
        """Another text begins."""
        if self._saved >= 0.0:
            self._vain = self._left = 0
