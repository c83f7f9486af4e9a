"""The choice against trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from foresay.spec.budget.weigh import CandidatePlan, DraftSeconds, Estimate, ExpectedTree, falling, weigh, weigh_pinned
from foresay.spec.tree import TreeShape


def free(name: str, levels: float, nodes: float, chain: bool) -> float:
    return 0.0


def priced(prices: dict[str, float]) -> DraftSeconds:
    return lambda name, levels, nodes, chain: prices[name]


def offers_of(rng: random.Random, sequences: int) -> list[Estimate]:
    """Random chances, that fall along a chain, and trees of a few nodes."""
    made = []
    for _ in range(sequences):
        chances, chance = [], 1.0
        for _ in range(rng.randint(0, 3)):
            chance *= rng.uniform(0.3, 1.0)
            chances.append(chance)
        trees = {name: ExpectedTree(rng.uniform(0.1, 1.5), rng.randint(1, 4), 1.0) for name in ("small", "head")}
        made.append(Estimate(chances, trees, rng.uniform(0.2, 0.9)))
    return made


def tried(estimates: Sequence[Estimate], seconds: Sequence[float], drafting: dict[str, float], pace: float) -> float:
    """The most that any number of nodes of any way of drafting is worth."""
    best = len(estimates) - pace * seconds[len(estimates)]
    for looked, model in itertools.product((False, True), ("", *drafting)):
        pools = [[*estimate.found] if looked else [] for estimate in estimates]
        pools += [falling(estimate.tree(model, looked)) for estimate in estimates] if model else []
        for counts in itertools.product(*(range(len(pool) + 1) for pool in pools)):
            if any(counts):
                tokens = len(estimates) + sum(sum(pool[:n]) for pool, n in zip(pools, counts, strict=True))
                spent = drafting[model] if any(counts[len(estimates) :]) else 0.0
                best = max(best, tokens - pace * (seconds[len(estimates) + sum(counts)] + spent))
    return best


@pytest.mark.parametrize("sequences", [1, 2])
def test_as_good_as_the_best_of_all(sequences: int) -> None:
    rng = random.Random(sequences)
    drafted = 0
    for _ in range(150):
        estimates, slope = offers_of(rng, sequences), rng.uniform(0.0, 0.3)
        seconds = [1.0 + slope * rows for rows in range(40)]
        prices = {"small": rng.uniform(0.0, 0.4), "head": rng.uniform(0.0, 0.4)}
        pace = sequences * rng.uniform(0.7, 2.0)
        way = weigh(estimates, seconds, priced(prices), pace)[0]
        assert way.worth == pytest.approx(tried(estimates, seconds, prices, pace))
        drafted += way.nodes > 0
    assert 30 < drafted < 150


def test_a_chains_nodes_are_as_likely_as_their_paths() -> None:
    chain = ExpectedTree(sum(0.9**depth for depth in range(1, 5)), 4.0, 4.0)
    assert falling(chain) == pytest.approx([0.9, 0.81, 0.729, 0.6561])


def test_a_trees_nodes_are_chances_that_fall_alike_and_add_up() -> None:
    rng = random.Random(0)
    for _ in range(500):
        nodes = rng.choice((rng.uniform(0.1, 6.0), rng.uniform(1.0, 63.0)))
        tree = ExpectedTree(rng.choice((1.0, 0.97, rng.random(), rng.random() ** 4)) * nodes, nodes, 1.0)
        chances = falling(tree)
        assert len(chances) == max(1, round(nodes))
        assert all(0.0 <= chance <= 1.0 for chance in chances)
        assert sum(chances) == pytest.approx(min(tree.tokens, len(chances)), rel=1e-5)
        assert chances == pytest.approx([chances[0] ** depth for depth in range(1, len(chances) + 1)])
    assert falling(ExpectedTree()) == []
    assert falling(ExpectedTree(0.0, 3.0, 1.0)) == [0.0] * 3


def test_of_a_tree_as_much_is_asked_for_as_is_worth_its_rows() -> None:
    """Eight rows are free: a tree for one, and a node or two for each of four."""
    estimate = Estimate(trees={"small": ExpectedTree(1.2, 6.0, 3.0)})
    seconds = [1.0 + 0.2 * max(0, rows - 8) for rows in range(64)]
    alone = weigh([estimate], seconds, lambda *_: 0.1, pace=1.0)[0]
    assert alone.trees == (ExpectedTree(pytest.approx(1.2), 6, 3.0),)  # type: ignore[arg-type]
    many = weigh([estimate] * 4, seconds, lambda *_: 0.1, pace=4.0)[0]
    assert many.nodes == 4
    assert [(tree.nodes, tree.levels) for tree in many.trees] == [(1, 1.0)] * 4


def test_a_staircase_is_climbed_to_its_edge() -> None:
    """Rows 5 to 8 cost the same: the fifth is worth little, all four together are."""
    seconds = [1.0] * 5 + [1.5] * 4 + [9.0] * 20
    assert weigh([Estimate([0.95 - 0.1 * n for n in range(9)])], seconds, free, pace=1.5)[0].found == (7,)


def test_nodes_go_where_the_next_one_is_worth_most() -> None:
    estimates = [Estimate([0.9, 0.8, 0.7]), Estimate([0.6, 0.2]), Estimate()]
    seconds = [1.0 + 0.5 * rows for rows in range(20)]
    assert weigh(estimates, seconds, free, pace=1.3)[0].found == (3, 0, 0)
    assert weigh(estimates, seconds, free, pace=1.0)[0].found == (3, 1, 0)


def test_no_draft_is_always_weighed() -> None:
    ways = weigh([Estimate([0.01])], [0.0, 1.0, 2.0], free, pace=1.0)
    assert ways[0] == CandidatePlan("", (0,), (), 1.0, 1.0, 0, 0.0)
    assert weigh([Estimate(), Estimate()], [1.0, 1.0, 1.0], free, pace=2.0)[0].tokens == 2.0


def test_a_model_beside_what_was_found_helps_where_that_is_wrong() -> None:
    tree = {"small": ExpectedTree(1.0, 2.0, 2.0)}
    unsure = Estimate([0.5, 0.45], tree, 0.5)
    sure = Estimate([0.98, 0.96], tree, 0.02)
    seconds = [1.0 + 0.02 * rows for rows in range(20)]
    kinds = [weigh([estimate], seconds, lambda *_: 0.2, pace=1.0)[0].kind for estimate in (unsure, sure)]
    assert kinds == [("small", True), ("", True)]


def test_no_more_rows_are_taken_than_are_known() -> None:
    estimate = Estimate([0.9] * 70, {"small": ExpectedTree(4.0, 70.0, 9.0)})
    ways = weigh([estimate], [1.0] * 65, free, pace=1.0)
    assert {way.kind for way in ways} == {("", True), ("", False), ("small", False), ("small", True)}
    assert max(way.nodes for way in ways) <= 64
    assert next(way.found for way in ways if way.kind == ("", True)) == (63,)


def test_a_pinned_shape_is_drafted_by_whoever_is_best_at_it() -> None:
    estimate = Estimate([0.5, 0.3], {"small": ExpectedTree(2.4, 9.0, 9.0)}, 0.5)
    seconds, shape = [1.0 + 0.1 * rows for rows in range(20)], TreeShape.chain(3)
    asked: list[tuple[float, float, bool]] = []

    def best(price: float) -> CandidatePlan:
        def drafting(name: str, levels: float, nodes: float, chain: bool) -> float:
            asked.append((levels, nodes, chain))
            return price

        return weigh_pinned([estimate], seconds, drafting, shape)[0]

    dear, cheap = best(2.0), best(0.1)
    assert (dear.kind, dear.found) == (("", True), (2,))
    assert (cheap.kind, cheap.nodes) == (("small", False), 3)
    assert (cheap.tokens, cheap.seconds) == pytest.approx((3.4, 1.5))
    assert set(asked) == {(3, 3, True)}
    assert best(100.0).nodes, "somebody drafts who has anything to say"
    assert not weigh_pinned([Estimate()], seconds, free, shape)[0].nodes


def test_a_chain_is_as_long_as_its_levels_and_rows_are_worth() -> None:
    """And a tree is weighed beside it, which takes more time: the host decides after each of its levels."""
    trees = {"small": ExpectedTree(1.2, 4.0, 2.0)}
    estimate = Estimate((), trees, chains={"small": [0.6, 0.4, 0.2, 0.1]})
    seconds = [1.0 + 0.05 * rows for rows in range(20)]

    def best(deciding: float, level: float) -> list[CandidatePlan]:
        def drafting(name: str, levels: float, nodes: float, chain: bool) -> float:
            return (level if chain else level + deciding) * levels

        return weigh([estimate], seconds, drafting, pace=1.0)

    chain, tree, none = best(deciding=0.1, level=0.1)
    assert (chain.chain, tree.chain, none.model) == (True, False, "")
    assert chain.trees == (ExpectedTree(pytest.approx(1.2), 3, 3),)  # type: ignore[arg-type]
    assert (chain.nodes, chain.tokens, chain.seconds) == pytest.approx((3, 2.2, 1.2 + 0.3))
    assert best(deciding=0.1, level=0.3)[0].nodes == 2
    assert not best(deciding=0.0, level=0.05)[-1].model
    assert best(deciding=-0.1, level=0.1)[0].chain is False


def test_chains_of_several_are_drafted_together_each_as_long_as_it_may_be() -> None:
    one, two = Estimate(chains={"m": [0.9, 0.8, 0.7]}), Estimate(chains={"m": [0.9]})
    one, two = (each._replace(trees={"m": ExpectedTree(0.1, 1.0, 1.0)}) for each in (one, two))
    way = weigh([one, two, Estimate()], [1.0] * 64, lambda *_: 0.1, pace=1.0)[0]
    assert way.chain
    assert [tree.nodes for tree in way.trees] == [3, 1, 0]
    few = weigh([one, two], [1.0] * 5, lambda *_: 0.1, pace=1.0)[0]
    assert few.nodes == 2, "no more rows than are known"


def test_a_pinned_chain_brings_what_chains_do() -> None:
    estimate = Estimate((), {"m": ExpectedTree(2.0, 9.0, 3.0)}, chains={"m": [0.5, 0.25, 0.125]})
    seconds = [1.0] * 20
    assert weigh_pinned([estimate], seconds, free, TreeShape.chain(2))[0].tokens == pytest.approx(1.75)
    assert weigh_pinned([estimate], seconds, free, TreeShape((2, 1)))[0].tokens == pytest.approx(3.0)
