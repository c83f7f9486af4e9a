"""What a step may cost, and which drafters draft in it, if any: chosen by measurements.

::

    CostModel   seconds of a step, of a draft and of a step without drafts, corrected by every step
    chance      whether a drafted token will be accepted, for every drafter, learnt from earlier outcomes
    weigh       the drafter and tree that are worth most, of all that are possible
    Budget      calls lookups, weighs, gives reasons; learns from every step
"""

from foresay.spec.budget.cost import CostModel

__all__ = ["CostModel"]
