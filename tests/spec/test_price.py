"""What a draft that grows pays, against trying everything."""

from __future__ import annotations

import numpy as np
import pytest

from foresay.spec.price import Bar, Price, worth


def price_of(rng: np.random.Generator, rows: int = 12) -> Price:
    """Some steps of the rows' price are free."""
    steps = rng.uniform(0, 0.3, rows) * (rng.random(rows) < 0.7)
    return Price(rng.uniform(0, 0.3), [0.0, *steps.cumsum().tolist()])


@pytest.mark.parametrize("seed", range(20))
def test_as_many_nodes_are_worth_their_rows_as_bring_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    price, chances = price_of(rng), rng.uniform(0, 1, rng.integers(0, 20)).tolist()
    ordered = sorted(chances, reverse=True)
    gains = [sum(ordered[:count]) - price.rows[count] for count in range(min(len(ordered), 12) + 1)]
    nodes = worth(ordered, price.rows)
    assert gains[nodes] == pytest.approx(max(gains))


def test_a_level_is_drafted_where_what_hangs_below_it_is_worth_it() -> None:
    """Every node's children count for what they are expected to bring beyond their rows."""
    bar = Bar((0.5, 0.2), 0.1, 0.4)
    assert bar.reached([1.0]) and bar.reached([0.8, 0.4]) and not bar.reached([0.6, 0.3])
    assert not bar.reached([0.2] * 20), "of which none is worth a row"


def test_a_bar_is_known_before_the_tree_and_goes_by_the_rows_around_its_end() -> None:
    """Five rows are free and further ones cost two tokens each; so few nodes are free, and many are not."""
    rows = [0.0] * 6 + [2.0 * row for row in range(1, 20)]
    few, many = (Price(0.1, rows, nodes=nodes).bar(0.6) for nodes in (2, 8))
    assert (few.row, many.row) == (0.0, 2.0)
    assert few.shares[0] == 0.6 and sum(few.shares) < 1.0 and list(few.shares) == sorted(few.shares, reverse=True)
    assert few.reached([0.5]) and not many.reached([1.0] * 4)


def test_where_no_rows_are_left_nothing_is_worth_one() -> None:
    price = Price(0.0, [0.0], 1, 1)
    assert worth([0.9], price.rows) == 0
    assert not Price(1.0, [0.0], 1, 1).bar(0.5).reached([0.9])
