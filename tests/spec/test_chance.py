"""The one estimator: how far claims are believed, from what came of them, in a text, a salt, a cell of a table."""

from __future__ import annotations

import random

import pytest

from foresay.spec.budget.chance import Cells, Feature, Salts, chance_of, claimed, learn
from foresay.spec.tree import DraftTree


def test_the_surer_it_is_the_less_it_moves() -> None:
    claims = Salts().claims("")
    moves: list[float] = []
    for _ in range(100):
        before = claims.chance(0.5)
        claims.saw(0.5, True)
        claims.saw(0.5, False)
        moves.append(abs(claims.chance(0.5) - before))
    assert claims.chance(0.5) < 0.53
    assert max(moves[-20:]) < 0.5 * moves[0]


def test_a_text_that_changes_is_noticed_however_long_it_was() -> None:
    claims = Salts().claims("")
    for _ in range(2000):
        claims.saw(0.5, True)
    for _ in range(15):
        claims.saw(0.5, False)
    assert claims.chance(0.5) < 0.6


def test_numbers_stay_small_where_all_claims_are_alike() -> None:
    rng, claims = random.Random(2), Salts().claims("")
    for _ in range(20_000):
        claims.saw(0.9, rng.random() < 0.9)
    for _ in range(20):
        claims.saw(0.2, False)
    assert 0.75 < claims.chance(0.9) < 0.97


def test_where_a_text_is_copied_low_claims_are_believed_after_a_few_tokens() -> None:
    claims = Salts().claims("")
    for claim in (0.3, 0.4, 0.5, 0.6):
        claims.saw(claim, True)
    assert claims.chance(0.3) > 0.55


def test_a_new_sequence_begins_where_its_salt_is() -> None:
    salts = Salts()
    for salt, hit in (("a", False), ("b", True)) * 10:
        one = salts.claims(salt)
        for _ in range(30):
            one.saw(0.8, hit)
    assert salts.claims("a").chance(0.8) < 0.4
    assert salts.claims("b").chance(0.8) > 0.9


def test_a_new_salt_begins_where_all_are_and_soon_goes_its_own_way() -> None:
    salts = Salts()
    for salt in range(10):
        one = salts.claims(str(salt))
        for _ in range(30):
            one.saw(0.8, False)
    one = salts.claims("new")
    assert one.chance(0.8) < 0.4
    for _ in range(8):
        one.saw(0.8, True)
    assert one.chance(0.8) > 0.7


def test_no_more_salts_are_remembered_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresay.spec.budget.chance._SALTS", 2)
    salts = Salts()
    _, before, _ = salts.claims("a").features
    for salt in ("b", "a", "c"):
        salts.claims(salt)
    assert salts.claims("a").features[1] is before, "it was asked for after b"
    for salt in ("d", "e"):
        salts.claims(salt)
    assert salts.claims("a").features[1] is not before


def test_claims_of_chains_and_what_they_come_to() -> None:
    chain = DraftTree.chain([7, 1, 2], "suffix", (1.0, 0.5, 0.4))
    assert claimed(chain) == pytest.approx([0.5, 0.8])
    assert len(set(claimed(DraftTree.chain([7, 1, 2])))) == 1, "one that says nothing claims the same of all"
    claims = Salts().claims("")
    assert claims.chances(claimed(chain)) == pytest.approx([0.5 * 12 / 13, 0.4 * 12 / 14])
    assert len(claims.chances([0.3] * 19)) < 6, "no farther than anything is likely"
    claims.run = 10**9
    assert claims.chances(claimed(chain)) == pytest.approx([0.5, 0.4])


def test_features_share_what_an_outcome_teaches_by_how_unsure_they_are() -> None:
    """So what is known of many nodes is moved by one of them less than what is known of it alone."""
    sure, unsure = Feature(0.1), Feature(1.0)
    learn(0.0, (sure, unsure), True)
    assert 0 < sure.shift < 0.2 * unsure.shift
    alone = Feature(1.1)
    learn(0.0, (alone,), True)
    assert chance_of(0.0, (sure, unsure)) == pytest.approx(chance_of(0.0, (alone,)), abs=0.01)


def test_a_cell_is_believed_as_it_begins_and_then_by_how_often_it_came() -> None:
    cells, dice = Cells([0.9, 0.2, 0.5]), random.Random(3)
    for _ in range(300):
        cells.saw(0, dice.random() < 0.6)
        cells.saw(1, True)
    assert cells.chances[0] == pytest.approx(0.6, abs=0.12)
    assert cells.chances[1] > 0.9
    assert cells.chances[2] == 0.5
