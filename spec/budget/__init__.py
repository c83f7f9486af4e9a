"""What a step may cost, and who drafts in it: the choice by what was measured, drafting nothing included.

::

    CostModel, DraftCost   seconds of a pass by rows and context, of a draft by levels; corrected by every step
    Claims, Promises      what a lookup's own chances are worth in one text, and what a model's are
    weigh                 the drafter and tree that are worth most, of all that could be asked for
    Budget                asks whoever looks things up, weighs, says why; learns from every verdict
"""

from foresay.spec.budget.cost import MIXED_STEP_FACTOR, MIXED_STEP_SECONDS, CostModel

__all__ = ["MIXED_STEP_FACTOR", "MIXED_STEP_SECONDS", "CostModel"]
