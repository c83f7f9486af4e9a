"""From drafters to the budget that chooses among them.

::

    a model, a lookup, one of the user's own    each a member, with what it costs here (server/engine/calibrate.py)
    Budget                                      chooses at every step, unless one drafter has one shape (--draft-tokens)
    CombinedDrafter                             all of them as one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drafters.combined import CombinedDrafter, members_of
from drafters.prediction import PredictionDrafter
from drafters.routed import RoutedDrafter
from server.engine.calibrate import ProfileRun
from server.engine.drafters.registry import entry_of
from server.settings.config import EngineConfig
from spec.budget import CostModel
from spec.budget.budget import Budget
from spec.budget.members import OPEN, Member
from spec.price import Price
from spec.protocols import Drafter
from spec.scheduler import PREDICTED_LEVELS
from spec.tree import TreeShape

#: Tokens drafted ahead where a shape is fixed and nobody says how far.
DEFAULT_TOKENS = 4


def pinned(config: EngineConfig) -> TreeShape | None:
    """The shape that the settings ask for in every step: a given tree or a chain; None if they leave it open."""
    if config.draft_tree is not None:
        return TreeShape.parse(config.draft_tree)
    return None if config.draft_tokens is None else TreeShape.chain(config.draft_tokens)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, all as one, and who chooses: nobody where one drafter has one shape. shape: the largest. cost:
    of a step, by its rows.

    What a request predicts of its answer is drafted in any case.
    """

    drafter: Drafter
    budget: Budget | None
    shape: TreeShape
    cost: CostModel

    @classmethod
    def of(
        cls, config: EngineConfig, drafters: Sequence[Drafter], profile_run: ProfileRun, say: Callable[[str], None]
    ) -> Drafting:
        """Measures what steps cost, and what each drafter does if there is anything to choose."""
        shape = pinned(config)
        if not drafters or (shape is not None and not shape.levels):
            drafters, shape = (), TreeShape()
        say("measuring the step cost")
        cost = profile_run.curve()
        if shape is not None and len(drafters) < 2:
            drafter = RoutedDrafter(PredictionDrafter(cost), drafters[0] if drafters else None, shape)
            return cls(drafter, None, shape, cost)
        say("measuring what drafting costs")
        members = [_member(drafter, profile_run) for drafter in drafters]
        # First: of a token that several propose it is said that the request predicted it.
        budget = Budget([Member.looking(PredictionDrafter(), PREDICTED_LEVELS), *members], cost, shape)
        return cls(CombinedDrafter(budget), budget, budget.shape, cost)

    def shapes(self) -> list[tuple[Drafter, TreeShape]]:
        """Each drafter, and the largest tree that it is asked for."""
        if self.budget is None:
            return [(drafter, self.shape) for drafter in members_of(self.drafter).values()]
        opened = replace(OPEN, price=Price(0.0, np.zeros(1)))
        members = self.budget.members.values()
        return [(one.drafter, self.budget.pinned or opened.limited(one.levels)) for one in members if not one.looks]


def _member(drafter: Drafter, profile_run: ProfileRun) -> Member:
    entry = entry_of(drafter)
    if entry.looks:
        return Member.looking(drafter)
    levels = entry.levels(drafter)
    return Member.model(drafter, profile_run.draft_cost(drafter, levels), levels)
