"""What was weighed holds for a few steps, as far as it is made of what moves slowly: weighing takes time too.

::

    nothing was found, nor is now     the whole choice
    something is found now            that models were far from worth it: they are left out, what is found is weighed
"""

from __future__ import annotations

from typing import NamedTuple

from spec.budget.mixed import Why
from spec.budget.ways import Offer, Taken

#: For how many steps more a choice holds.
_HELD = 3
#: A model is far from worth it that would bring so many tokens less than the best, of each sequence, time counted in.
_FAR = 0.25
#: That holds where what is found is at least as likely to be right as this share of what was found then.
_AS_LIKELY = 0.9


class Held(NamedTuple):
    """What was weighed for these sequences, and for how many steps more it holds.

    found: the chances that something found comes at depth 1, added up; None if nothing was. allowed: what asking each
    model may lose of a step. far: no model is near the best way. idle: why nobody drafts, once that is planned.
    """

    running: list[str]
    offers: list[Offer]
    ways: list[Taken]
    allowed: dict[str, float]
    found: float | None
    far: bool
    steps: int = _HELD
    idle: Why | None = None

    def later(self, running: list[str]) -> Held | None:
        """The same one step later, unless that is too late or others run then."""
        return self._replace(steps=self.steps - 1) if self.steps and self.running == running else None

    def leaves_out(self, found: float | None) -> bool:
        """Whether models are still out of the question, now that this was found: no less likely than it was then."""
        return self.far and found is not None and found >= _AS_LIKELY * (self.found or 0.0)

    def anew(self, ways: list[Taken]) -> Held:
        """The same with what was found weighed anew; of its models is told what was weighed then."""
        told = [way for way in self.ways if way.model]
        return self._replace(ways=[*ways, *told], found=self.found or 0.0, idle=None)


def far(ways: list[Taken], pace: float) -> bool:
    """Whether no model is near the best way, which comes first."""
    best, margin = ways[0].value(pace), _FAR * len(ways[0].found)
    return all(best - way.value(pace) > margin for way in ways if way.model)
