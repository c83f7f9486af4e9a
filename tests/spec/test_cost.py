"""What steps and drafts take, corrected by the steps, and what a step would take without drafts."""

from __future__ import annotations

import random
from dataclasses import astuple
from statistics import fmean

import numpy as np
import pytest

from foresay.spec.budget.cost import (
    CHANGED,
    FEW,
    OLD,
    CostModel,
    DraftCost,
    DraftSeconds,
    PartCosts,
    in_order,
    of_draft,
)


def saw(cost: CostModel, rows: int, seconds: float, times: int = 1, sequences: int = 1, context: int = 0) -> None:
    for _ in range(times):
        cost.saw(rows, sequences, context, 0, {"forward": seconds})


def now(cost: CostModel, rows: int) -> float:
    cost._read_for = (0, 0, 0)
    return cost.table(1, 0, 64)[rows]


def test_a_slower_machine_is_slower_at_all_rows_and_soon() -> None:
    cost = CostModel([1, 8, 64], [1.0, 1.5, 4.0])
    for _ in range(20):  # not the first steps any more
        saw(cost, 1, 1.0)
        saw(cost, 8, 1.5)
    for _ in range(10):
        saw(cost, 1, 2.0)
        saw(cost, 8, 3.0)
    assert now(cost, 1) == pytest.approx(2.0, rel=0.05)
    assert now(cost, 8) == pytest.approx(3.0, rel=0.05)
    assert now(cost, 64) > 6.5


def test_one_step_that_was_held_up_hardly_counts() -> None:
    cost = CostModel([1, 8], [1.0, 2.0])
    draft = cost.drafts(DraftCost(0.1, 0.1))
    for _ in range(30):
        saw(cost, 1, 1.0)
        draft.saw(of_draft(4), 0.5)
    saw(cost, 1, 1000.0)
    assert now(cost, 1) < 1.15
    draft.saw(of_draft(4), 1000.0)
    assert float(draft.seconds(of_draft(4))) < 0.7


def test_what_is_unsure_is_hoped_to_be_low_until_it_was_seen_and_again_after_long() -> None:
    cost = CostModel([1, 8], [1.0, 3.0])
    assert cost.table(1, 0, 8, hope=True)[8] < 1.3
    saw(cost, 8, 3.0, 5)
    hoped = cost.table(1, 0, 8, hope=True)
    assert hoped[8] == pytest.approx(3.0, rel=0.1)
    assert hoped[1] < 0.5, "which was not seen"
    for _ in range(40):
        saw(cost, 1, 1.0)
    assert cost.table(1, 0, 8, hope=True)[8] == pytest.approx(3.0, rel=0.25)
    saw(cost, 1, 1.0, 9000)
    cost._read_for = (0, 0, 0)
    assert cost.table(1, 0, 8, hope=True)[8] < 2.2


def test_a_sum_that_was_seen_is_sure_though_none_of_its_parts_is() -> None:
    parts = PartCosts().group(astuple(DraftCost(0.1, 0.1, deciding=0.1)))
    for _ in range(10):
        parts.saw(of_draft(1), 0.3)
    hoped, grown = DraftSeconds.of(parts, 0.0, hope=True), True
    assert hoped.seconds(1, 1, grown) == pytest.approx(0.3, rel=0.05)
    assert hoped.seconds(12, 12, grown) < 0.9 * float(parts.seconds(of_draft(12)))


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("points", [1, 2, 5])
def test_a_table_is_what_each_of_its_rows_costs(sequences: int, points: int) -> None:
    """With its share of the context, between the points, below and beyond them; more rows never less."""
    rng = random.Random(points)
    rows = sorted(rng.sample(range(1, 40), points))
    behind = [(row, rng.uniform(1e-5, 1e-4)) for row in sorted(rng.sample(range(1, 20), points))]
    cost = CostModel(rows, [rng.uniform(0.01, 0.05) for _ in rows], behind)
    for _ in range(50):
        own = rng.randrange(1, 20)
        cost.saw(own * sequences, sequences, 500, 0, {"forward": rng.uniform(0.01, 0.06)})
    most, points_now = 0.0, in_order(cost.group.now[:-2], 1 / cost.group.variances[:-2])
    for row, seconds in enumerate(cost.table(sequences, 700, 64)):
        near = np.interp(row, rows, points_now) * max(1.0, row / rows[-1])
        most = max(most, near + float(cost._added(np.array([row / sequences]), 700)[0] * cost.group.now[-2]))
        assert seconds == pytest.approx(most)
        assert type(seconds) is float


def test_a_model_that_rested_pays_for_what_was_written_meanwhile() -> None:
    cost = DraftCost(0.1, 0.2, 0.01)
    assert cost.seconds(3, more=50) == pytest.approx(0.1 + 0.6 + 0.5)
    reported = DraftSeconds.of(PartCosts().group(astuple(cost)), 50, hope=False)
    assert reported.seconds(3, 3, True) == pytest.approx(1.2)
    assert reported.seconds(63, 63, False) == pytest.approx(0.1 + 63 * 0.2 + 0.5), "as deep as any shape"


def test_a_table_is_read_again_when_the_batch_the_context_or_the_costs_have_changed() -> None:
    cost = CostModel([1, 8], [1.0, 2.0], context=[(1, 0.001)])
    cost.group.learnt = 1000
    first = cost.table(1, 100, 8)
    assert cost.table(1, 101, 8) is first
    assert cost.table(1, 1000, 8)[1] == pytest.approx(2.0)
    assert len(cost.table(2, 1000, 16)) == 17
    saw(cost, 2, 2 * (1.0 + 1 / 7 + 1.0), 50, sequences=2, context=1000)
    for _ in range(16):
        last = cost.table(2, 1000, 16)
    assert last[2] == pytest.approx(2 * (2.0 + 1 / 7), rel=0.1)


def test_a_context_that_was_measured_to_add_nothing_is_learnt() -> None:
    cost = CostModel([1, 8], [0.01, 0.02], context=[(1, 0.0), (64, 0.0)])
    for _ in range(100):
        saw(cost, 1, 0.01, context=200)
        saw(cost, 1, 0.02, context=60_000)
    short, long = (cost.table(1, context, 8)[1] for context in (200, 60_000))
    assert [short, long] == pytest.approx([0.01, 0.02], rel=0.15)


# -- what a step would take without drafts ---------------------------------------------------------------------------

PASSES = {1: 0.0088, 2: 0.0090, 5: 0.0096, 9: 0.0110, 16: 0.0135}
DRAFTING, REST = 0.003, 0.0002
ROOT = PASSES[1] + REST


class Machine:
    """Steps that draft, on a machine whose pace changes; some are held up. wrong: by how much start-up mismeasured
    passes of several rows. reported: by step that drafted, what it would have taken without over what that takes."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.now, self.pace, self.reported = 1000.0, 1.0, list[float]()
        points = [seconds * (wrong if rows > 2 else 1.0) for rows, seconds in PASSES.items()]
        self.cost = CostModel(list(PASSES), points, clock=lambda: self.now)
        self._dice = random.Random(3)

    def run(self, steps: int, *rows: int) -> None:
        for _ in range(steps):
            chosen = self._dice.choice(rows)
            phases = {"plan": REST, "propose": DRAFTING * (chosen > 1), "forward": PASSES[chosen]}
            held_up = self._dice.uniform(2, 10) if self._dice.random() < 0.03 else 1.0
            phases = {
                name: spent * self.pace * held_up * self._dice.lognormvariate(0, 0.05) for name, spent in phases.items()
            }
            self.now += sum(phases.values())
            reported = self.cost.saw(chosen, 1, 0, chosen - 1, phases)
            if chosen > 1:
                self.reported.append(reported / (ROOT * self.pace))
            else:
                assert reported == pytest.approx(phases["plan"] + phases["forward"])


@pytest.mark.parametrize("pace", [1.0, 3.0, 0.35])
def test_what_a_step_would_have_taken_without_drafts_goes_with_the_machine(pace: float) -> None:
    """And what held it up would have held up the other one: 3 % took six times as long."""
    machine = Machine()
    machine.cost.begun(ROOT)
    machine.pace = pace
    machine.run(2000, 2, 5, 9, 16)
    assert fmean(machine.reported) == pytest.approx(1 + 0.03 * 5, rel=0.25)


def test_it_names_why_it_doubts() -> None:
    machine = Machine()
    machine.run(50, 5)
    assert set(machine.reported) == {0.0} and machine.cost.doubt == FEW, "nobody measured, and no step went without"
    machine.run(1, 1)
    assert machine.cost.doubt == ""
    machine.pace = 3.0
    machine.run(30, 5)
    assert machine.cost.doubt == CHANGED
    machine.run(20, 1)
    assert machine.cost.doubt == ""
    machine.now += 4000
    assert machine.cost.doubt == OLD
    started = CostModel([1], [0.01], clock=lambda: 5.0)
    started.begun(0.011)
    assert started.doubt == ""


def test_of_short_steps_few_are_learnt_from() -> None:
    cost = CostModel([1], [0.0002])
    saw(cost, 1, 0.0002, 100)
    for seconds, times in ((0.0002, 4), (0.01, 200), (0.1, 1000)):
        before = cost.group.learnt
        saw(cost, 1, seconds, 1000)
        assert cost.group.learnt - before == pytest.approx(times, abs=1), "about once in 50 ms"


def test_what_is_seldom_seen_is_learnt_from_as_well_as_what_is_always() -> None:
    """So one step of a size that was held up is soon forgotten."""
    cost = CostModel([1, 2, 4], [0.002, 0.0022, 0.003])
    saw(cost, 1, 0.002, 30)
    saw(cost, 3, 0.025, 3)
    saw(cost, 1, 0.002, 40)
    for _ in range(8):
        saw(cost, 1, 0.002, 30)
        saw(cost, 3, 0.0026)
    assert now(cost, 3) == pytest.approx(0.0026, rel=0.25)


def test_what_is_out_of_order_becomes_one_by_how_sure_each_is() -> None:
    draw = np.random.default_rng(1)
    values, weights = np.exp(draw.normal(size=(2, 50)))
    ordered = in_order(values, weights)
    assert (np.diff(ordered) >= 0).all()
    assert np.log(ordered) @ weights == pytest.approx(np.log(values) @ weights)
    assert in_order(ordered, weights) is ordered
    assert in_order(np.array([4.0, 1.0, 5.0]), np.array([1.0, 3.0, 1.0])) == pytest.approx([2**0.5, 2**0.5, 5.0])


def test_parts_stay_as_they_are_where_a_step_takes_what_was_expected() -> None:
    group = PartCosts().group([1.0, 2.0])
    for _ in range(10):
        group.saw(np.array((1.0, 1.0)), 3.0)
    assert group.now == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("seed", range(10))
def test_no_sum_of_parts_is_surer_than_sure(seed: int) -> None:
    """However seldom steps are learnt from, and whichever of them."""
    draw, parts = random.Random(seed), PartCosts()
    groups = [parts.group([draw.uniform(1e-4, 1e-2) for _ in range(4)]) for _ in range(3)]
    for _ in range(200):
        parts.steps += draw.choice((1, 20, 2000))
        group = draw.choices(groups, (100, 10, 1))[0]
        amounts = of_draft(draw.randint(1, 8), draw.randint(0, 9), draw.random() < 0.5)
        group.saw(amounts, float(amounts @ group.now) * draw.choice((0.3, 0.9, 1.1, 3.0)), draw.random() < 0.8)
        assert np.linalg.eigvalsh(parts.covariance)[0] > -1e-9


def test_what_was_held_up_is_not_learnt_from_more_often_than_it_happens() -> None:
    """One step in a hundred waits for others, which takes a third of all time."""
    cost, rng = CostModel([1], [0.0002]), random.Random(1)
    for _ in range(20_000):
        saw(cost, 1, 0.01 if rng.random() < 0.01 else 0.0002)
    assert now(cost, 1) < 0.00025
