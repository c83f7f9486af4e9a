"""Texts that suit a model come in turns with such that do not: it drafts those, however badly it did the others."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from foresay.spec.budget.cost import DraftCost
from tests.drafters.test_combined import sequence
from tests.spec.machine import Guesser, Machine, Prices

#: A plain step takes 2.2 ms; drafting one token, half as much more.
PRICES = Prices([(rows, 0.002 + 0.0002 * rows) for rows in (1, 2, 5, 9, 64)], DraftCost(3e-4, 6e-4, 5e-5, 2e-4))


class Texts(Machine):
    """In turns a text in which the model is right for 0.3 of the tokens, and for 0.75. It claims a half of all."""

    right = 0.3

    def _coming(self) -> list[int]:
        claims, self.guesser = self.guesser, Guesser(self.right)
        coming = super()._coming()
        self.guesser = claims
        return coming


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_a_text_that_suits_a_model_is_drafted_after_those_that_do_not(seed: int) -> None:
    """Without hope for a new text nothing is drafted with seed 6, and with 0 not before the tenth text."""
    machine, drafted = Texts(PRICES, 0.5), list[float]()
    machine.dice.seed(seed)
    for text in range(24):
        machine.right = (0.3, 0.75)[text % 2]
        machine.budget.ended(machine.one)
        machine.one = replace(sequence(), id=f"{text}", limit=10**9)
        machine.run(60)
        if text % 2 and text > 6:
            drafted.append(fmean(choice != "none" for choice in machine.choices[-60:]))
    assert fmean(drafted) > 0.6
