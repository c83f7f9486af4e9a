"""The one estimator: how far claims are believed, from what came of them, in a text, a salt, a cell of a table."""

from __future__ import annotations

import math
import random

import pytest

from foresay.spec.budget.chance import Cells, Outcomes, Salts, claimed
from foresay.spec.tree import DraftTree


def test_the_odds_of_claims_are_corrected_by_those_of_what_came() -> None:
    counts, dice = Outcomes(), random.Random(1)
    for _ in range(600):
        claim = dice.choice((0.3, 0.6))
        odds = 3.0 * claim / (1.0 - claim)
        counts.saw(claim, dice.random() < odds / (1.0 + odds))
    assert counts.shift == pytest.approx(math.log(3.0), abs=0.35)
    for claim in (0.01, 0.3, 0.6, 0.98):
        odds = math.exp(counts.shift) * claim / (1.0 - claim)
        assert counts.corrected(claim) == pytest.approx(odds / (1.0 + odds))
    assert counts.corrected(0.0) == 0.0 and counts.corrected(1.0) == 1.0


def test_the_more_is_known_the_less_it_moves() -> None:
    claims = Salts().claims("", 0)
    moves: list[float] = []
    for _ in range(100):
        before = claims.chance(0.5)
        claims.saw(0.5, True)
        claims.saw(0.5, False)
        moves.append(abs(claims.chance(0.5) - before))
    assert claims.chance(0.5) == pytest.approx(0.5, abs=0.03)
    assert max(moves[-20:]) < 0.5 * moves[0]


def test_a_text_that_changes_is_noticed_however_long_it_was() -> None:
    claims = Salts().claims("", 0)
    for _ in range(2000):
        claims.saw(0.5, True)
    for _ in range(60):
        claims.saw(0.5, False)
    assert claims.chance(0.5) < 0.6


def test_where_a_text_is_copied_low_claims_are_believed_after_a_few_tokens() -> None:
    claims = Salts().claims("", 0)
    for claim in (0.3, 0.4, 0.5, 0.6):
        claims.saw(claim, True)
    assert claims.chance(0.3) > 0.5


def test_a_new_sequence_begins_where_its_salt_is() -> None:
    salts = Salts()
    for salt, hit in (("a", False), ("b", True)) * 10:
        one = salts.claims(salt, 0)
        for _ in range(30):
            one.saw(0.8, hit)
    assert salts.claims("a", 0).chance(0.8) < 0.4
    assert salts.claims("b", 0).chance(0.8) > 0.9


def test_a_new_salt_begins_where_all_are_and_soon_goes_its_own_way() -> None:
    salts = Salts()
    for salt in range(10):
        one = salts.claims(str(salt), 0)
        for _ in range(30):
            one.saw(0.8, False)
    one = salts.claims("new", 0)
    assert one.chance(0.8) < 0.4
    for _ in range(8):
        one.saw(0.8, True)
    assert one.chance(0.8) > 0.5


def test_a_new_text_is_hoped_to_suit_better_than_those_before_until_it_is_known() -> None:
    salts = Salts()
    for _ in range(10):
        before = salts.claims("", 0)
        for _ in range(10):
            before.saw(0.5, False)
    one = salts.claims("", 0)
    assert one.hope(0.5) > 1.15 * one.chance(0.5)
    for came in (True, False) * 3:
        one.saw(0.5, came)
    assert one.hope(0.5) == pytest.approx(one.chance(0.5))


def test_no_more_salts_are_remembered_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresay.spec.budget.chance._SALTS", 2)
    salts = Salts()
    for _ in range(20):
        salts.claims("a", 0).saw(0.5, False)
    believed = salts.claims("a", 0).chance(0.5)
    for salt in ("b", "a", "c"):
        salts.claims(salt, 0)
    assert salts.claims("a", 0).chance(0.5) == believed, "it was asked for after b"
    for salt in ("d", "e"):
        salts.claims(salt, 0)
    assert salts.claims("a", 0).chance(0.5) > believed


def test_claims_of_chains_and_what_they_come_to() -> None:
    chain = DraftTree.chain([7, 1, 2], "suffix", (1.0, 0.5, 0.4))
    assert claimed(chain) == pytest.approx([0.5, 0.8])
    assert len(set(claimed(DraftTree.chain([7, 1, 2])))) == 1, "one that says nothing claims the same of all"
    claims = Salts().claims("", 0)
    assert claims.chances(claimed(chain)) == pytest.approx([0.5 * 12 / 13, 0.4 * 12 / 14])
    assert len(claims.chances([0.3] * 19)) < 6, "no farther than anything is likely"
    claims.run = 10**9
    assert claims.chances(claimed(chain)) == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize("hit", [True, False])
def test_numbers_stay_numbers_however_long_all_come_or_none(hit: bool) -> None:
    claims = Salts().claims("", 0)
    for _ in range(20_000):
        claims.saw(1.0, hit)
        claims.saw(0.0, hit)
    assert 0.0 < claims.chance(0.0) < claims.chance(1.0) < 1.0


def test_a_cell_is_believed_as_it_begins_and_then_by_how_often_it_came() -> None:
    cells, dice = Cells([0.9, 0.2, 0.5]), random.Random(3)
    for _ in range(300):
        cells.saw(0, dice.random() < 0.6)
        cells.saw(1, True)
    assert cells.chances[0] == pytest.approx(0.6, abs=0.12)
    assert cells.chances[1] > 0.9
    assert cells.chances[2] == 0.5
