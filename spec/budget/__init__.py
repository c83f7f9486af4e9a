"""What a step may cost, and who drafts in it: the choice by what was measured, drafting nothing included.

::

    StepCost, DraftCost   seconds of a pass by rows and context, of a draft by levels; corrected by every step
    Claims                what a lookup's own chances are worth in one text
    Rates                 how often a draft was right: of one sequence, held near those of all
    weigh                 the drafter and tree of most tokens per second, of all that could be asked for
    Budget                asks whoever looks things up, weighs, says why; learns from every verdict
"""

from spec.budget.cost import MIXED_STEP_FACTOR, StepCost

__all__ = ["MIXED_STEP_FACTOR", "StepCost"]
