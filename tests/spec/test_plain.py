"""What a step would take without drafts, on machines whose pace changes; and how seldom one is asked for."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from foresay.spec.budget import CostModel
from foresay.spec.plain import CHANGED, FEW, OLD, PLAIN_EVERY, PlainPace

PASSES = {1: 0.0088, 2: 0.0090, 5: 0.0096, 9: 0.0110, 16: 0.0135}
DRAFTING, REST = 0.003, 0.0012
#: Seconds of a step without drafts on a quiet machine; how much longer one takes in the mean, as some are held up.
ROOT, SELDOM = PASSES[1] + REST, 0.03
HELD_UP = 1 + SELDOM * 5


class Machine:
    """Steps that draft, and those that are asked to go without. pace: how much slower than at start-up it is now.

    rows: of trees. wrong: by how much start-up mismeasured passes of several rows. told: at each step that drafted,
    what it would have taken without, as a share of what that takes, and the doubt it was told with.
    """

    def __init__(self, rows: tuple[int, ...] = (5,), wrong: float = 1.0) -> None:
        self.now, self.pace, self.rows = 1000.0, 1.0, rows
        cost = CostModel(list(PASSES), [seconds * (wrong if rows > 2 else 1.0) for rows, seconds in PASSES.items()])
        self.plain = PlainPace(cost, ROOT, clock=lambda: self.now)
        self.told: list[tuple[float, str]] = []
        self.steps = self.without = 0
        self._dice = random.Random(3)

    def run(self, steps: int, speculate: bool = True) -> None:
        for _ in range(steps):
            self.step(not speculate or self.plain.due())

    def step(self, without: bool) -> None:
        rows = 1 if without else self._dice.choice(self.rows)
        phases = {"propose": 0.0 if without else DRAFTING, "forward": PASSES[rows], "draw": REST}
        seconds = {phase: self._took(spent) for phase, spent in phases.items()}
        self.now += sum(seconds.values())
        told = self.plain.saw(rows, 1, rows - 1, seconds)
        self.steps, self.without = self.steps + 1, self.without + without
        if without:
            assert told == pytest.approx(seconds["forward"] + seconds["draw"])
        else:
            self.told.append((told / (ROOT * HELD_UP * self.pace), self.plain.doubt))

    def _took(self, seconds: float) -> float:
        """Some steps are held up by something else."""
        held_up = self._dice.uniform(2, 10) if self._dice.random() < SELDOM else 1.0
        return seconds * self.pace * self._dice.lognormvariate(0, 0.05) * held_up

    def off(self) -> float:
        """How far off the estimate is in the mean, as a speed-up adds it up, where it is told without a doubt."""
        return abs(fmean(share for share, doubt in self.told if not doubt) - 1)

    @property
    def unsure(self) -> int:
        return sum(bool(doubt) for _, doubt in self.told)


@pytest.mark.parametrize("pace", [1.0, 3.0, 0.35])
@pytest.mark.parametrize(("rows", "wrong"), [((5,), 1.0), ((2, 5, 9, 16), 1.0), ((5,), 1.3), ((5,), 0.75)])
def test_the_estimate_is_right_whatever_start_up_measured(pace: float, rows: tuple[int, ...], wrong: float) -> None:
    machine = Machine(rows, wrong)
    machine.pace = pace
    machine.run(3000)
    assert machine.off() < 0.15
    assert machine.unsure < 64
    assert machine.without <= 3000 / PLAIN_EVERY + 3, "what it costs"


def test_a_pace_that_changes_is_followed_at_once_and_doubted_until_plain_steps_were_timed() -> None:
    machine = Machine()
    machine.run(600)
    assert machine.plain.doubt == ""
    for pace in (3.0, 1.0, 0.4):
        machine.pace, machine.told = pace, []
        machine.run(400)
        assert abs(fmean(share for share, _ in machine.told[16:]) - 1) < 0.15
        assert {doubt for _, doubt in machine.told[8:24]} >= {CHANGED}
        assert 16 <= machine.unsure < 130
        assert machine.told[-1][1] == ""


def test_a_machine_that_changes_all_the_time_is_not_asked_for_more_than_it_earned() -> None:
    machine = Machine()
    for number in range(200):
        machine.pace = 3.0 if number % 2 else 1.0
        machine.run(40)
    assert machine.without <= 8000 / 128 + 3


def test_plain_requests_of_another_pace_mislead_nobody_for_long() -> None:
    """Compare on a page: a hundred plain steps, while the machine becomes three times as slow."""
    machine = Machine()
    machine.run(300)
    machine.pace = 3.0
    machine.run(100, speculate=False)
    machine.told = []
    machine.run(800)
    assert 16 <= machine.unsure < 160
    assert machine.off() < 0.15


@pytest.mark.parametrize(("pause", "asked"), [(60.0, 1 / 100), (900.0, 1 / 50)])
def test_short_answers_with_pauses_between_are_sure_most_of_the_time(pause: float, asked: float) -> None:
    machine = Machine()
    for _ in range(40):
        machine.now += pause
        machine.run(60)
    assert machine.off() < 0.15
    assert machine.unsure < 0.2 * machine.steps
    assert machine.without < asked * machine.steps + 3
    assert machine.without <= machine.steps / 128 + machine.now / 120, "at most one in two minutes beside"


def test_it_says_why_it_doubts() -> None:
    machine = Machine()
    assert machine.plain.doubt == FEW
    machine.run(300)
    assert machine.plain.doubt == ""
    machine.now += 301
    assert machine.plain.doubt == OLD


def test_where_nobody_measured_nobody_is_asked_early_and_the_first_plain_step_tells() -> None:
    plain = PlainPace(CostModel([1], [0.01]))
    for _ in range(100):
        assert plain.saw(5, 1, 4, {"forward": 0.02}) == 0.0
    assert not plain.due()
    assert plain.saw(1, 1, 0, {"propose": 0.5, "forward": 0.01}) == pytest.approx(0.01)
    assert plain.saw(5, 1, 4, {"forward": 0.02}) == pytest.approx(0.01)
