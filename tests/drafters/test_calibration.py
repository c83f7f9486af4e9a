"""Chances become honest from what is hit, slowly forget, and never turn the order of siblings of a rank around."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from foresay.drafters.calibration import GROUPS, REFRESH, Calibration, Curves
from foresay.spec.sampling import KINDS, SamplingParams
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import Above
from foresay.verifier.ops.sample import keep_children


def logistic(odds: np.ndarray) -> np.ndarray:
    chances: np.ndarray = 1 / (1 + np.exp(-odds))
    return chances


def siblings(rng: np.random.Generator, count: int = 6) -> np.ndarray:
    """Log chances of the likeliest tokens, best first."""
    logits = np.sort(2.5 * rng.standard_normal(60))[::-1]
    chances: np.ndarray = logits - np.log(np.exp(logits).sum())
    return chances[:count]


def came(count: int, rank: int) -> np.ndarray:
    """Which of ``count`` candidates came; -1: none of them."""
    hit: np.ndarray = np.arange(count) == rank
    return hit


def calibrated(calibration: Calibration, kind: int, chances: np.ndarray) -> np.ndarray:
    """[F, k]: log chances as trees take them."""
    curves, rows = Curves(1, torch.device("cpu")), torch.tensor(chances, dtype=torch.float32)[None]
    curves.write(calibration, [kind])
    above = Above(
        torch.zeros(1, rows.shape[1]), torch.ones(1, rows.shape[1], dtype=torch.int64), torch.arange(rows.shape[1])
    )
    every = torch.arange(rows.numel()).view_as(rows)
    with references():  # the kernel keeps no more than a tree's nodes
        kept = keep_children(every, rows, above, every.flatten(), curves.pieces)
    found = torch.full((rows.numel(),), -torch.inf).scatter_reduce(0, kept.tokens[0], kept.scores[0], "amax")
    return found.view_as(rows[0]).double().numpy()


def feed(calibration: Calibration, slope: float, shift: float, steps: int, depth: int = 0, kind: int = 2, seed=0):
    """Trials of a draft whose first choices are hit with log-odds ``slope * z + shift``, its others never."""
    rng = np.random.default_rng(seed)
    random.seed(seed)  # which trials are learnt from
    for _ in range(steps):
        chances = siblings(rng)
        odds = chances - np.log(-np.expm1(chances))
        hit = 0 if rng.random() < logistic(slope * odds[0] + shift) else -1
        calibration.saw(kind, depth, chances, came(6, hit))
        calibration.step()


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 2.0), (0.6, 0.5), (1.5, -1.0)])
def test_it_learns_how_often_candidates_are_hit(slope, shift) -> None:
    calibration = Calibration()
    feed(calibration, slope, shift, 3000)
    for chance in (0.2, 0.4, 0.6, 0.8):
        wanted = logistic(slope * np.log(chance / (1 - chance)) + shift)
        first, second = np.exp(calibrated(calibration, 2, np.log([[chance, chance / 4]]))[0])
        assert first == pytest.approx(wanted, abs=0.12)
        assert second < 0.03
        assert math.exp(calibrated(calibration, 1, np.log([[chance]]))[0, 0]) == pytest.approx(chance, abs=0.02)


def test_what_a_judge_saw_is_where_chains_begin_and_is_not_lost_by_some_misses() -> None:
    judged, unknown, lost = Calibration(), Calibration(), list[float]()
    judged.expect([0.8, 0.6], [0.5, 0.4])
    assert judged.chain(0, 3) == pytest.approx((0.8, 0.48, 0.288))
    assert judged.chain(2, 2) == pytest.approx((0.5, 0.2))
    assert 0.5 < judged.first(1, 0) < 0.8
    for calibration in (judged, unknown):
        before = calibration.first(0, 0)
        for _ in range(4):
            calibration.saw(0, 0, np.log([0.3]), came(1, -1))
        lost.append(before - calibration.first(0, 0))
    assert lost[0] < 0.6 * lost[1]


def test_it_follows_a_text_that_changes() -> None:
    calibration, chances = Calibration(), np.log([[0.3]])
    feed(calibration, 1.0, 2.0, 8000)
    before = math.exp(calibrated(calibration, 2, chances)[0, 0])
    feed(calibration, 1.0, -1.0, 16000, seed=1)
    after = math.exp(calibrated(calibration, 2, chances)[0, 0])
    assert before == pytest.approx(logistic(np.log(3 / 7) + 2), abs=0.05)
    assert after == pytest.approx(logistic(np.log(3 / 7) - 1), abs=0.06)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_it_sees_chances_stay_chances_in_order(seed) -> None:
    """Impossible and certain candidates among them, and trials that are pure nonsense."""
    calibration, rng = Calibration(), np.random.default_rng(seed)
    for _ in range(700):
        chances = np.sort(np.concatenate(([0.0, -np.inf, -500.0, 1e-7, np.nan], siblings(rng, 20))))[::-1]
        calibration.saw(seed % KINDS, int(rng.integers(12)), chances, came(25, int(rng.integers(-1, 25))))
        calibration.step()
    raw = np.concatenate(([-np.inf, -400.0, -40.0], np.linspace(-12, 0, 60)))
    for rank in range(GROUPS + 3):
        grid = np.full((len(raw), rank + 1), -1.0)
        grid[:, rank] = raw
        curve = calibrated(calibration, seed % KINDS, grid)[:, rank]
        assert curve[0] == -np.inf
        assert np.all(np.diff(curve[1:]) >= 0)
        assert np.all(curve <= 0)


def test_inactive_it_leaves_chances_alone_but_goes_on_learning() -> None:
    calibration, chances = Calibration(), np.log([[0.3, 0.1]])
    calibration.active = False
    feed(calibration, 1.0, 2.0, 300)
    assert calibrated(calibration, 2, chances) == pytest.approx(chances)
    calibration.active = True
    assert calibrated(calibration, 2, chances)[0, 0] > math.log(0.5)


def test_a_chain_goes_by_how_often_first_choices_were_hit() -> None:
    """Their chances are not computed."""
    calibration, rng = Calibration(), np.random.default_rng(0)
    random.seed(0)  # which steps are learnt from
    for _ in range(2000):
        for depth, share in enumerate((0.8, 0.5, 0.25)):
            calibration.saw(2, depth, np.array([np.nan]), came(1, 0 if rng.random() < share else -1))
        calibration.step()
    assert calibration.chain(2, 3) == pytest.approx((0.8, 0.4, 0.1), abs=0.06)
    assert calibrated(calibration, 2, np.log([[0.3]])) == calibrated(Calibration(), 2, np.log([[0.3]]))


def test_curves_are_made_anew_now_and_then_and_later_only_some_steps_are_learnt_from() -> None:
    calibration, made = Calibration(), list[int]()
    for step in range(6 * REFRESH):
        before = calibration.pieces(2)
        feed(calibration, 1.0, 0.0, 1, seed=step)
        if calibration.pieces(2) is not before:
            made.append(step)
    assert made[0] < 20 and {later - one for one, later in itertools.pairwise(made[4:])} == {REFRESH}
    first = calibration.first(2, 0)
    feed(calibration, 1.0, 0.0, 40, seed=1)
    assert calibration.first(2, 0) != first


def test_ways_of_drawing() -> None:
    assert [SamplingParams(temperature=t).kind for t in (0.0, 0.2, 0.75, 0.8, 1.5)] == [0, 1, 1, 2, 2]
