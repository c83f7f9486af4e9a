"""What a draft that grows pays, against trying everything."""

from __future__ import annotations

import numpy as np
import pytest

from foresay.spec.price import Price


def price_of(rng: np.random.Generator, rows: int = 12) -> Price:
    """Some steps of the rows' price are free."""
    steps = rng.uniform(0, 0.3, rows) * (rng.random(rows) < 0.7)
    return Price(rng.uniform(0, 0.3), np.concatenate(([0.0], steps.cumsum())))


def most(price: Price, chances: list[float]) -> float:
    """The best of all numbers of nodes."""
    ordered = sorted(chances, reverse=True)[: len(price.rows) - 1]
    return max(sum(ordered[:count]) - float(price.rows[count]) for count in range(len(ordered) + 1))


@pytest.mark.parametrize("seed", range(20))
def test_as_many_nodes_are_worth_their_rows_as_bring_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    price, chances = price_of(rng), rng.uniform(0, 1, rng.integers(0, 20))
    nodes, gain = price.worth(chances)
    assert gain == pytest.approx(most(price, chances.tolist()))
    assert gain == pytest.approx(np.sort(chances)[::-1][:nodes].sum() - price.rows[nodes])


def test_a_level_is_drafted_where_what_its_nodes_have_beyond_their_rows_pays_for_it() -> None:
    price = Price(0.2, [0.1 * rows for rows in range(12)])
    bar = price.bar(0.5)
    assert bar == pytest.approx((0.2, 0.4))
    assert bar.reached([0.5, 0.31]) and not bar.reached([0.5, 0.29]) and not bar.reached([0.3, 0.1, 0.19])


def test_the_price_is_what_would_come_in_the_time() -> None:
    price = Price.of(10.0, 0.05, [1.0, 1.0, 1.2, 1.5], 2)
    assert price.level == pytest.approx(0.5)
    assert price.rows == pytest.approx([0.0, 0.0, 2.0, 5.0])
    assert price.levels == 2


def test_where_no_rows_are_left_nothing_is_worth_one() -> None:
    price = Price.of(10.0, 0.0, [1.0], 1)
    assert price.worth(np.array([0.9])) == (0, 0.0)
    assert not price.bar(0.8).reached([0.9]) or price.bar(0.8).together == 0
