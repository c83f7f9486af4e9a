"""The steps before the first request: what they tell, and that nothing is left of them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest

from foresay.server.engine.calibrate import ProfileRun, filled
from foresay.spec.budget.cost import DraftCost
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_regimes import Foresight
from tests.spec.harness import Harness
from tests.spec.tables import TableModel


def rehearsed(max_model_len: int = 128, pages: int = 200) -> tuple[Harness, ProfileRun]:
    harness = Harness(TableModel(3), pages=pages, max_model_len=max_model_len)
    return harness, ProfileRun(harness.engine.info, harness.verifier, harness.pool)


def test_a_curve_of_growing_rows_and_what_a_draft_takes() -> None:
    harness, profile_run = rehearsed(max_model_len=64)
    assert [rows for rows, _ in profile_run.curve().points] == [1, 2, 3, 5, 6, 8, 9, 12, 16, 32]
    assert all(seconds > 0 for _, seconds in profile_run.curve().points)
    rng = random.Random(1)
    cost = profile_run.draft_cost(Foresight([rng.randrange(32) for _ in range(200)], lambda position: 0.5), 12)
    assert cost.seconds(4) >= cost.seconds(1) > 0
    assert profile_run.root_seconds() > 0
    harness.pool.check([], at_rest=True)
    assert harness.pool.available == harness.pool.num_pages - 1


@pytest.fixture(autouse=True)
def _no_time_but_what_is_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a little between two looks at the clock: others may use the machine too."""
    ticks, slept = itertools.count(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(ticks) + sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)


class Slow(Foresight):
    """Takes twenty milliseconds for a level. As Medusa heads do, it has no more levels than so many."""

    def __init__(self, levels: int) -> None:
        super().__init__([], lambda position: 0.0)
        self._levels = levels

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        made = []
        for sequence, requested in zip(sequences, shapes, strict=True):
            shape = requested.limited(self._levels)
            time.sleep(shape.levels * 0.02)
            made.append(filled(sequence.tokens[-1], shape, self.name))
        return made


class Deciding(Slow):
    """Grows its trees by their price, for which it takes ten milliseconds after each level but the last."""

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        time.sleep(sum(0.01 * (shape.levels - 1) for shape in shapes if shape.price))
        return super().propose(sequences, shapes)

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        return [0.5] * levels


def test_what_deciding_takes_after_a_level_is_a_price_of_trees_that_grow() -> None:
    _, profile_run = rehearsed()
    cost = profile_run.draft_cost(Deciding(12), 12)
    assert cost.deciding == pytest.approx(0.01, rel=0.01)
    assert cost.level + cost.deciding == pytest.approx(0.03, rel=0.01)
    assert rehearsed()[1].draft_cost(Slow(12), 12).deciding == 0.0


def grown(cost: DraftCost, levels: int) -> float:
    """What is expected of the tree that was measured."""
    tree = TreeShape((4, 4, 3, 3)).limited(levels)
    return cost.seconds(tree.levels, tree.nodes - 1 - tree.levels)


class Shown(Slow):
    """Has nothing to say before the target has computed a token, as heads have not."""

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        ready = [
            shape if sequence.table.length else TreeShape() for sequence, shape in zip(sequences, shapes, strict=True)
        ]
        return super().propose(sequences, ready)


def test_what_says_nothing_in_the_first_step_of_a_text_has_its_price_all_the_same() -> None:
    _, profile_run = rehearsed()
    cost = profile_run.draft_cost(Shown(12), 12)
    assert grown(cost, 12) == pytest.approx(4 * 0.02, rel=0.01)


def test_on_a_slow_machine_large_steps_are_not_tried_and_drafts_have_their_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foresay.server.engine.calibrate._LONG", 0.0)
    _, profile_run = rehearsed()
    assert [rows for rows, _ in profile_run.curve().points] == [1, 2, 3, 5]
    assert grown(profile_run.draft_cost(Slow(12), 12), 12) == pytest.approx(4 * 0.02, rel=0.01)


def test_where_there_is_room_for_one_drafted_token_that_is_the_price_of_a_level() -> None:
    _, profile_run = rehearsed(max_model_len=5)
    cost = profile_run.draft_cost(Slow(12), 12)
    assert cost.start == 0.0
    assert cost.seconds(1) == pytest.approx(0.02, rel=0.01)
    _, none = rehearsed(max_model_len=3)
    assert none.draft_cost(Slow(12), 12).seconds(4) == 0.0


@pytest.mark.parametrize("levels", [2, 3, 12])
def test_trees_have_their_price_however_deep_a_drafter_goes(levels: int) -> None:
    _, profile_run = rehearsed()
    cost = profile_run.draft_cost(Slow(levels), levels)
    assert cost.seconds(1) == pytest.approx(0.02, rel=0.01)
    assert grown(cost, levels) == pytest.approx(min(levels, 4) * 0.02, rel=0.01)


def test_a_context_without_room_is_no_error() -> None:
    """Of one that holds a few tokens only the small steps are measured; of one that holds none, nothing."""
    _, short = rehearsed(max_model_len=12)
    assert [rows for rows, _ in short.curve().points] == [1, 2, 3, 5, 6, 8, 9]
    _, none = rehearsed(max_model_len=1)
    assert none.root_seconds() == 0.0
    assert none.curve().points == [(1, 1.0)]


def test_a_small_cache_is_measured_as_far_as_it_goes() -> None:
    harness, profile_run = rehearsed(max_model_len=64, pages=8)
    assert [rows for rows, _ in profile_run.curve().points] == [1, 2, 3, 5, 6, 8, 9, 12, 16]
    harness.pool.check([], at_rest=True)
