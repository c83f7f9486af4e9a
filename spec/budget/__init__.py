"""What a step may cost, and who drafts in it: the choice by what was measured, drafting nothing included.

::

    CostModel   seconds of a step, of a draft and of a step without drafts, corrected by every step
    chance      whether a drafted token will come, whoever drafted it, learnt from those that came
    weigh       the drafter and tree that are worth most, of all that could be asked for
    Budget      asks those that look things up, weighs, says why; learns from every step
"""

from foresay.spec.budget.cost import CostModel

__all__ = ["CostModel"]
