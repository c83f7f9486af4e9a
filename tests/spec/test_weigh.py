"""The choice against trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import pytest

from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.weigh import NO_TREE, DraftOption, ExpectedTree, StepCosts


class Offer(NamedTuple):
    """What could be drafted for one sequence. remaining: of a tree's tokens, next to what was found."""

    found: Sequence[float] = ()
    trees: Mapping[str, ExpectedTree] = {}
    remaining: float = 1.0
    chains: Mapping[str, Sequence[float]] = {}


def weigh(offers: Sequence[Offer], by: StepCosts) -> list[DraftOption]:
    """All plans, the best first."""
    texts = [{m: (o.trees.get(m, NO_TREE), o.chains.get(m, ())) for m in {*o.trees, *o.chains}} for o in offers]
    ways = [*by.ways(texts)]
    if any(offer.found for offer in offers):
        ways += by.ways(texts, [offer.found for offer in offers], [offer.remaining for offer in offers])
    return sorted(ways, key=attrgetter("worth"), reverse=True)


def draft(start: float = 0.0, level: float = 0.0, deciding: float = 0.0) -> DraftCost:
    return DraftCost(start, level, 0.0, deciding)


def costs(seconds: Sequence[float], pace: float, **drafts: DraftCost) -> StepCosts:
    return StepCosts(seconds, drafts, pace)


def offers_of(rng: random.Random, sequences: int) -> list[Offer]:
    """Random chances, that fall along a chain, and trees of a few nodes."""
    made = []
    for _ in range(sequences):
        chances, chance = [], 1.0
        for _ in range(rng.randint(0, 3)):
            chance *= rng.uniform(0.3, 1.0)
            chances.append(chance)
        trees = {name: ExpectedTree(rng.uniform(0.1, 1.5), rng.randint(1, 4), 1.0) for name in ("small", "head")}
        chains = {"small": [0.6**depth for depth in range(1, 4)]}
        made.append(Offer(chances, trees, rng.uniform(0.2, 0.9), chains))
    return made


def tried(estimates: Sequence[Offer], by: StepCosts) -> float:
    """The most that any number of found nodes alone, and any length of chains, is worth."""
    rows = len(estimates)
    best = rows - by.pace * by.seconds[rows]
    for counts in itertools.product(*(range(len(estimate.found) + 1) for estimate in estimates)):
        tokens = rows + sum(sum(one.found[:n]) for one, n in zip(estimates, counts, strict=True))
        best = max(best, tokens - by.pace * by.seconds[rows + sum(counts)])
    for levels in range(1, 4):
        tokens = rows + sum(sum(one.chains["small"][:levels]) for one in estimates)
        spent = by.seconds[rows + rows * levels] + by.drafts["small"].seconds(levels, (rows - 1) * levels, False)
        best = max(best, tokens - by.pace * spent)
        if by.checks and any(one.found for one in estimates):
            first = [one.found[: levels - 1] for one in estimates]
            passes = max(1.0, levels - min(map(sum, first)))
            spent = by.seconds[rows + rows * levels] + by.drafts["small"].seconds(passes, 0.0, False)
            best = max(best, tokens - by.pace * spent)
    return best


@pytest.mark.parametrize("sequences", [1, 2])
def test_as_good_as_the_best_of_all(sequences: int) -> None:
    rng = random.Random(sequences)
    drafted = 0
    for number in range(150):
        estimates, slope = offers_of(rng, sequences), rng.uniform(0.0, 0.3)
        by = costs(
            [1.0 + slope * rows for rows in range(40)],
            sequences * rng.uniform(0.7, 2.0),
            small=draft(rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.4), 0.1),
            head=draft(rng.uniform(0.0, 0.4)),
        )._replace(checks=("small",)[: number % 2])
        ways = weigh(estimates, by)
        alone = [way for way in ways if not way.model or way.chain]
        assert max(way.worth for way in alone) == pytest.approx(tried(estimates, by))
        assert ways[0].worth == max(way.worth for way in ways)
        drafted += ways[0].nodes > 0
    assert 30 < drafted < 150


def test_a_tree_is_as_large_as_usual_or_smaller_where_rows_are_dear() -> None:
    """Eight rows are free: a tree for one, and smaller ones for each of four."""
    estimate = Offer(trees={"small": ExpectedTree(1.2, 6.0, 3.0)})
    seconds = [1.0 + 0.2 * max(0, rows - 8) for rows in range(64)]
    alone = weigh([estimate], costs(seconds, 1.0, small=draft(0.1)))[0]
    assert alone.trees == (ExpectedTree(1.2, 6.0, 3.0),)
    many = weigh([estimate] * 4, costs(seconds, 4.0, small=draft(0.1)))[0]
    assert many.nodes == 6
    assert [(tree.nodes, tree.levels) for tree in many.trees] == [(1.5, 1.0)] * 4
    assert many.tokens > 4 + 4 * 1.2 / 4, "the likeliest nodes are kept"


def test_a_model_next_to_found_nodes_helps_where_they_are_wrong() -> None:
    tree = {"small": ExpectedTree(1.0, 2.0, 2.0)}
    unsure = Offer([0.5, 0.45], tree, 0.5)
    sure = Offer([0.98, 0.96], tree, 0.02)
    seconds = [1.0 + 0.02 * rows for rows in range(20)]
    kinds = [weigh([estimate], costs(seconds, 1.0, small=draft(0.2)))[0].kind for estimate in (unsure, sure)]
    assert kinds == [("small", True), ("", True)]


def test_no_more_rows_are_taken_than_are_known() -> None:
    estimate = Offer([0.9] * 70, {"small": ExpectedTree(4.0, 70.0, 9.0)})
    ways = weigh([estimate], costs([1.0] * 65, 1.0, small=draft()))
    assert {way.kind for way in ways} == {("", True), ("", False), ("small", False), ("small", True)}
    assert max(way.nodes for way in ways) <= 64
    assert next(way.found for way in ways if way.kind == ("", True)) == (63,)


def test_a_chain_is_as_long_as_its_levels_and_rows_are_worth() -> None:
    """And a tree is compared with it, which takes more time: the host decides after each of its levels."""
    trees = {"small": ExpectedTree(1.2, 4.0, 2.0)}
    estimate = Offer((), trees, chains={"small": [0.6, 0.4, 0.2, 0.1]})
    seconds = [1.0 + 0.05 * rows for rows in range(20)]

    def best(deciding: float, level: float) -> list[DraftOption]:
        return weigh([estimate], costs(seconds, 1.0, small=draft(0.0, level, deciding)))

    chain, tree, none = best(deciding=0.1, level=0.1)
    assert (chain.chain, tree.chain, none.model) == (True, False, "")
    assert chain.trees == (ExpectedTree(pytest.approx(1.2), 3, 3),)  # type: ignore[arg-type]
    assert (chain.nodes, chain.tokens, chain.seconds) == pytest.approx((3, 2.2, 1.2 + 0.3))
    assert best(deciding=0.1, level=0.3)[0].nodes == 2
    assert not best(deciding=0.0, level=0.05)[-1].model
    assert best(deciding=-0.1, level=0.1)[0].chain is False


def test_chains_of_several_are_drafted_together_each_as_long_as_it_may_be() -> None:
    one, two = Offer(chains={"m": [0.9, 0.8, 0.7]}), Offer(chains={"m": [0.9]})
    one, two = (each._replace(trees={"m": ExpectedTree(0.1, 1.0, 1.0)}) for each in (one, two))
    way = weigh([one, two, Offer()], costs([1.0] * 64, 1.0, m=draft(0.1)))[0]
    assert way.chain
    assert [tree.nodes for tree in way.trees] == [3, 1, 0]
    few = weigh([one, two], costs([1.0] * 5, 1.0, m=draft(0.1)))[0]
    assert few.nodes == 2, "no more rows than are known"
