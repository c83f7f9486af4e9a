"""What was weighed holds for a few steps, as far as it is made of what moves slowly: weighing takes time too.

::

    no model was worth its time       models are left out: what is found now is weighed against drafting nothing
    nobody drafts, or a model alone   the whole choice is repeated, unless what is found now brings more than a little
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from spec.budget.case import Case
from spec.budget.mixed import Mixed, Why
from spec.budget.ways import Grove, Taken
from spec.budget.weigh import worth
from spec.sequence import Sequence

#: For how many steps more a choice holds; twice as many where no model was the best once more, so often at most.
_HELD, _DOUBLED = 3, 2
#: The pace is what it is without drafts, or no more than so many times that.
_LEAST_PACE = 1.05
#: So much less may time be worth than where a model begins to be worth it, since then it would draft otherwise.
_CHEAPER = 0.9
#: A choice is repeated where what is found brings so many tokens more than nothing, of each sequence, time counted in.
_LITTLE = 0.08

#: Of a sequence, the tokens and the seconds that are expected of a step, a model's tree in it, and nodes of the others.
Chosen = tuple[float, float, Grove | None, int]


@dataclass(slots=True, eq=False)
class Held:
    """What was weighed for these sequences, and for how many steps more it holds.

    allowed: what asking each model may lose of a step. worth_it: tokens in a second that time may be worth for a model
    to be worth its draft, whatever is found beside. planned, chosen, why: what can be repeated as it is; nothing if
    what was found takes part. sure: it does not end with a draft that was wrong.
    """

    running: list[str]
    ways: list[Taken]
    allowed: dict[str, float]
    worth_it: float
    steps: int = _HELD
    planned: Many[Mixed] = ()
    chosen: Many[Chosen] = ()
    why: Why | None = None
    sure: bool = True

    @classmethod
    def of(
        cls, running: list[str], ways: list[Taken], allowed: dict[str, float], pace: float, worth_it: float, again: int
    ) -> Held:
        """What was weighed now, at this pace. again: how often in a row no model was the best."""
        held, least = cls(running, ways, allowed, worth_it), len(running) / _plain(ways).seconds
        # Not where the pace is falling and models may soon be worth it, without anybody looking.
        if held.beside or pace <= _LEAST_PACE * least or held.leaves_out(least):
            held.steps = _HELD << min(max(0, again - 1), _DOUBLED)
        return held

    def goes_on(self, running: list[str]) -> bool:
        """Whether it holds one step later, in which these run."""
        self.steps -= 1
        return self.steps >= 0 and self.running == running

    def repeat(self, planned: list[Mixed], why: Why, cases: Many[Case], sure: bool) -> None:
        """From now on: what was planned, in which nothing that was found takes part."""
        self.planned, self.why, self.sure = planned, why, sure
        self.chosen = [(case.tokens, case.seconds, case.tree, case.others) for case in cases]

    def repeats(self, able: Many[Sequence]) -> bool:
        """Whether there is anything to repeat, and all of it fits these sequences still."""
        if not self.ways[0].model:
            return bool(self.planned)
        fits = [shape.levels <= sequence.most_levels for shape, sequence in zip(self.planned, able, strict=False)]
        return bool(fits) and all(fits)

    @property
    def beside(self) -> bool:
        """Whether something was found when this was weighed: where nothing is any more, time is soon worth less."""
        return any(self.ways[0].found)

    def beaten(self, found: list[Taken], pace: float) -> bool:
        """Whether what was planned is not to be repeated: what was found now brings too much, or the pace has changed
        for models. found: the best of it, and no draft, the better one first."""
        out = self.leaves_out(pace)
        if out if self.ways[0].model else self.beside and not out:
            return True
        little = _LITTLE * len(self.running) if self.ways[0].model else 0.0
        return worth(found[0], pace) - _plain(found).value(pace) > little

    def leaves_out(self, pace: float) -> bool:
        """Whether models are still out of the question."""
        return _CHEAPER * pace > self.worth_it


def _plain(ways: list[Taken]) -> Taken:
    return next(way for way in ways if not way.model and not way.nodes)
