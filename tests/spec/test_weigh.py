"""The choice against trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from spec.budget.ways import Grove, Offer, Taken
from spec.budget.weigh import EDGE, MODEL_EDGE, weigh, weigh_pinned


def offers_of(rng: random.Random, sequences: int) -> list[Offer]:
    """Random chances, that fall along a chain."""

    def chain(most: int) -> list[float]:
        chances, chance = [], 1.0
        for _ in range(rng.randint(0, most)):
            chance *= rng.uniform(0.3, 1.0)
            chances.append(chance)
        return chances

    made = []
    for _ in range(sequences):
        found, models = chain(3), {name: chain(3) for name in ("small", "head")}
        beside = {name: [0.6 * chance for chance in chances] for name, chances in models.items()}
        made.append(Offer(found, found[0] if found else 0.0, models, beside if found else {}))
    return made


def tried(offers: Sequence[Offer], seconds: Sequence[float], drafting: dict[str, float], pace: float) -> float:
    """The most that any way of drafting is worth, less the edge it must have."""
    best = -1e9
    for looked, model in itertools.product((False, True), ("", *drafting)):
        found = [range(len(offer.found) + 1) if looked else range(1) for offer in offers]
        gains = [
            [(1 - offer.first) * chance for chance in offer.beside.get(model, ())]
            if looked and offer.found
            else list(offer.models.get(model, ()))
            for offer in offers
        ]
        levels = [range(len(gain) + 1) if model else range(1) for gain in gains]
        for counts in itertools.product(*found):
            for deep in itertools.product(*levels):
                tokens = len(offers) + sum(sum(o.found[:n]) for o, n in zip(offers, counts, strict=True))
                tokens += sum(sum(gain[:n]) for gain, n in zip(gains, deep, strict=True))
                spent = seconds[len(offers) + sum(counts) + sum(deep)] + max(deep) * drafting.get(model, 0.0)
                edge = MODEL_EDGE if any(deep) else EDGE if any(counts) else 0.0
                best = max(best, tokens - pace * spent - edge * len(offers))
    return best


@pytest.mark.parametrize("sequences", [1, 2])
def test_as_good_as_the_best_of_all(sequences: int) -> None:
    rng = random.Random(sequences)
    drafted = 0
    for _ in range(150):
        offers, slope = offers_of(rng, sequences), rng.uniform(0.0, 0.3)
        seconds = [1.0 + slope * rows for rows in range(20)]
        drafting = {"small": rng.uniform(0.0, 0.4), "head": rng.uniform(0.0, 0.4)}
        pace = sequences * rng.uniform(0.7, 2.0)
        way = weigh(offers, seconds, lambda name, levels, nodes, grown=False: drafting[name] * levels, pace)[0]  # noqa: B023
        edge = MODEL_EDGE if way.model else EDGE if way.nodes else 0.0
        wanted = tried(offers, seconds, drafting, pace)
        assert way.value(pace) - edge * sequences == pytest.approx(wanted)
        drafted += way.nodes > 0
    assert 40 < drafted < 150


def test_a_staircase_is_climbed_to_its_edge() -> None:
    """Rows 5 to 8 cost the same: the fifth is worth little, all four together are."""
    seconds = [1.0] * 5 + [1.5] * 4 + [9.0] * 20
    way = weigh(
        [Offer([0.95 - 0.1 * n for n in range(9)], 0.95)],
        seconds,
        lambda name, levels, nodes, grown=False: 0.0,
        pace=1.5,
    )[0]
    assert way.found == (7,)


def test_nodes_go_where_the_next_one_is_worth_most() -> None:
    offers = [Offer([0.9, 0.8, 0.7], 0.9), Offer([0.6, 0.2], 0.6), Offer()]
    seconds = [1.0 + 0.5 * rows for rows in range(20)]
    assert weigh(offers, seconds, lambda name, levels, nodes, grown=False: 0.0, pace=1.3)[0].found == (3, 0, 0)
    assert weigh(offers, seconds, lambda name, levels, nodes, grown=False: 0.0, pace=1.0)[0].found == (3, 1, 0)


def test_no_draft_is_always_weighed() -> None:
    ways = weigh([Offer([0.01], 0.01)], [0.0, 1.0, 2.0], lambda name, levels, nodes, grown=False: 0.0, pace=1.0)
    assert ways[0] == Taken("", (0,), (0,), 1.0, 1.0)
    assert (
        weigh([Offer(), Offer()], [1.0, 1.0, 1.0], lambda name, levels, nodes, grown=False: 0.0, pace=2.0)[0].tokens
        == 2.0
    )


def test_a_model_beside_what_was_found_helps_where_that_is_wrong() -> None:
    alone = [0.6, 0.4]
    unsure = Offer([0.5, 0.45], 0.5, {"small": alone}, {"small": alone})
    sure = Offer([0.98, 0.96], 0.98, {"small": alone}, {"small": alone})
    seconds = [1.0 + 0.02 * rows for rows in range(20)]
    kinds = [
        weigh([offer], seconds, lambda name, levels, nodes, grown=False: 0.1 * levels, pace=1.0)[0].kind
        for offer in (unsure, sure)
    ]
    assert kinds == [("small", True), ("", True)]


def test_a_pinned_shape_is_drafted_by_whoever_is_best_at_it() -> None:
    offer = Offer([0.5, 0.3], 0.5, {"small": [0.9, 0.8, 0.7, 0.6]}, {"small": [0.5]})
    seconds = [1.0 + 0.1 * rows for rows in range(20)]
    dear, cheap = (
        weigh_pinned([offer], seconds, lambda name, levels, nodes, grown=False: price, 3, 3)[0]  # noqa: B023
        for price in (2.0, 0.1)
    )
    assert (dear.kind, dear.found) == (("", True), (2,))
    assert (cheap.kind, cheap.levels) == (("small", False), (3,))
    assert cheap.tokens == pytest.approx(3.4)
    assert not weigh_pinned([Offer()], seconds, lambda name, levels, nodes, grown=False: 0.0, 3, 3)[0].nodes


def test_a_tree_costs_what_branching_does() -> None:
    """Beside what was found a model's chain makes a tree; alone it does not."""
    offer = Offer([0.5], 0.5, {"small": [0.8]}, {"small": [0.8]})
    seconds = [1.0] * 20

    def kinds(branching: float) -> list[tuple[str, bool]]:
        ways = weigh([offer], seconds, lambda name, levels, nodes, grown=False: 0.1, pace=1.0, branching=branching)
        return [way.kind for way in ways]

    assert kinds(0.0)[0] == ("small", True)
    assert kinds(0.3)[0] == ("small", False)


def test_whoever_grows_trees_is_weighed_with_these_alone() -> None:
    chain, tree = [0.9, 0.8, 0.7], Grove(1.4, 3.0, 2.0)
    offer = Offer(models={"small": chain}, trees={"small": tree})
    asked: list[tuple[float, float, bool]] = []

    def drafting(name: str, levels: float, nodes: float, grown: bool = False) -> float:
        asked.append((levels, nodes, grown))
        return 0.1

    best, plain = weigh([offer], [1.0] * 20, drafting, pace=1.0, branching=0.05)
    assert asked == [(2.0, 2.0, True)]
    assert (best.grown, best.levels, best.nodes, best.tokens) == ((tree,), (2,), 3, 2.4)
    assert best.seconds == pytest.approx(1.15)
    assert plain.kind == ("", False)


def test_where_trees_as_large_as_they_were_do_not_pay_a_chain_may() -> None:
    """Eight rows are free: a tree for one, and one node for each of four."""
    offer = Offer(models={"small": [0.6, 0.36]}, trees={"small": Grove(1.0, 6.0, 2.0)})
    seconds = [1.0 + 0.2 * max(0, rows - 8) for rows in range(64)]

    def best(sequences: int) -> Taken:
        many = [offer] * sequences
        return weigh(many, seconds, lambda name, levels, nodes, grown=False: 0.1, pace=float(sequences))[0]

    assert best(1).grown
    assert best(4).levels == (1, 1, 1, 1)
    assert not best(4).grown


def test_a_tree_that_is_dearer_than_what_it_brings_is_no_way() -> None:
    offer = Offer(models={"small": [0.2]}, trees={"small": Grove(0.2, 3.0, 2.0)})
    ways = weigh([offer], [1.0] * 20, lambda name, levels, nodes, grown=False: 0.3, pace=1.0)
    assert not ways[0].nodes
    assert not any(way.grown for way in ways)
