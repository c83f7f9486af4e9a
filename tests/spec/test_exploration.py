"""What mostly brings nothing is tried now and then: models at rest, and looking things up."""

from __future__ import annotations

import pytest

from foresay.spec.budget.exploration import PROBING, Exploration, Looks
from foresay.spec.budget.weigh import CandidatePlan, ExpectedTree

PLAIN = CandidatePlan("", (0,), (), 1.0, 1.0, 0, 0.0)


def way(model: str, lost: float, found: int = 0) -> CandidatePlan:
    """One that is worth so many tokens less than no draft."""
    return CandidatePlan(model, (found,), (ExpectedTree(0.5, 1.0, 1.0),), 1.5, 1.0 + lost, 1 + found, -lost)


def explored(
    exploration: Exploration, ways: list[CandidatePlan], steps: int, reading: float = 0.0, behind: float = 0.0
) -> list[str]:
    """The drafter explored in each of so many steps; "" for the best one."""
    names = {one.model: reading for one in ways if one.model}
    left = dict.fromkeys(names, behind)
    done = [exploration.due(ways, 1.0, names, left) for _ in range(steps)]
    return [one.model if one is not ways[0] else "" for one in done]


def test_trees_are_tried_where_chains_are_best_and_the_other_way_round() -> None:
    """Of a model that is not the best, the better of the two alone."""
    chain, tree = way("m", -0.5)._replace(chain=True), way("m", -0.4)
    for ways in ([chain, tree, PLAIN], [tree._replace(worth=0.6), chain, PLAIN]):
        exploration, names = Exploration(), {"m": 5.0}
        done = [exploration.due(ways, 1.0, names, {"m": 0.0}) for _ in range(4000)]
        lost = max(ways[1].seconds - ways[0].seconds, ways[0].worth - ways[1].worth)
        assert {one.model for one in done} == {"m"}
        assert lost * sum(one is not ways[0] for one in done) == pytest.approx(
            sum(PROBING * one.seconds for one in [ways[0]] * 4000), rel=0.1
        )
    exploration = Exploration()
    ways = [PLAIN, chain._replace(worth=-0.1), tree._replace(worth=-0.2)]
    done = [exploration.due(ways, 1.0, {"m": 0.0}, {"m": 0.0}) for _ in range(4000)]
    assert {id(one) for one in done} == {id(PLAIN), id(ways[1])}


@pytest.mark.parametrize("lost", [0.05, 0.5, 2.0])
def test_what_exploration_loses_stays_below_its_share(lost: float) -> None:
    done = explored(Exploration(), [PLAIN, way("m", lost)], 8000)
    assert lost * done.count("m") / 8000 == pytest.approx(PROBING, rel=0.1)


def test_a_cheap_one_does_not_spend_what_was_saved_for_a_dear_one() -> None:
    done = explored(Exploration(), [PLAIN, way("cheap", 0.2), way("dear", 2.0)], 3000)
    assert done.count("dear") == pytest.approx(3000 * PROBING / 2.0, abs=1)
    assert done.count("cheap") > 5 * done.count("dear")


def test_for_a_model_that_drafts_nothing_nothing_is_saved() -> None:
    """Of a request that names its drafter, say."""
    exploration = Exploration()
    assert explored(exploration, [PLAIN], 2000) == [""] * 2000
    assert explored(exploration, [PLAIN, way("m", 0.5)], 100) == [""] * 100


@pytest.mark.parametrize("token", [PROBING / 4, PROBING])
def test_reading_what_was_written_meanwhile_is_paid_on_top_of_the_share(token: float) -> None:
    """What has to be read grows as fast as the share, or faster: without more it would never draft."""
    exploration, unread, count = Exploration(), 0.0, 0
    for _ in range(2000):
        unread += token
        if explored(exploration, [PLAIN, way("m", 0.1)], 1, reading=token, behind=unread)[0]:
            unread, count = 0.0, count + 1
    assert count >= 10


def test_the_leader_is_not_explored_and_found_nodes_are_left_as_they_are() -> None:
    """What drafts next to found nodes is compared with them; alone it would lose that."""
    best = CandidatePlan("", (2,), (), 2.0, 1.0, 2, 1.0)
    alone, together = way("m", 0.0), way("m", 0.1, found=2)
    exploration = Exploration()
    done = [exploration.due([best, alone, together, PLAIN], 1.0, {"m": 0.0}, {"m": 0.0}) for _ in range(3000)]
    assert {one.kind for one in done} == {("", True), ("m", True)}
    assert set(explored(Exploration(), [way("m", -0.5), PLAIN], 2000)) == {""}


def run(looks: Looks, steps: int, plan: float, right: float = 0.0) -> list[int]:
    """So many steps of 1 ms, of which looking takes ``plan`` where it is done; the steps in which it was."""
    looked = []
    for step in range(steps):
        if looks.due():
            looked.append(step)
            looks.saw(plan, 0.001, right)
    return looked


def test_what_costs_next_to_nothing_drafts_at_every_step() -> None:
    assert run(Looks(), 100, plan=0.000002) == list(range(100))


def test_in_vain_it_takes_a_small_share_of_the_time() -> None:
    looks = Looks()
    run(looks, 200, plan=0.0003)
    spent = 0.0003 * len(run(looks, 1000, plan=0.0003))
    assert spent / (1.0 + spent) < 0.025


@pytest.mark.parametrize(("anew", "looked"), [("right", [0, 1, 2, 3]), ("begin", [0, 2])])
def test_something_right_and_another_text_begin_anew(anew: str, looked: list[int]) -> None:
    looks = Looks()
    run(looks, 3000, plan=0.0003)
    if anew == "right":
        while not looks.due():
            pass
        looks.saw(0.0003, 0.001, right=8.0)
    else:
        looks.begin()
    assert run(looks, 4, plan=0.0003) == looked


@pytest.mark.parametrize("plan", [0.0001, 0.0003, 0.003])
def test_short_texts_one_after_the_other_do_not_take_much_more(plan: float) -> None:
    looks, looked = Looks(), 0
    for _ in range(200):
        looks.begin()
        looked += len(run(looks, 50, plan))
    assert plan * looked / (200 * 50 * 0.001) < 0.025


def test_a_first_choice_that_was_slow_is_forgotten() -> None:
    """Code and weights are cold in it."""
    looks = Looks()
    assert looks.due()
    looks.saw(0.02, 0.001, 0.0)
    assert len(run(looks, 20_000, plan=0.0002)) > 100


def test_what_is_right_drafts_at_every_step() -> None:
    assert run(Looks(), 100, plan=0.0005, right=1.0) == list(range(100))


def test_found_nodes_that_bring_less_than_their_rows_take_are_looked_for_more_and_more_rarely() -> None:
    """And where nothing pays, looking takes less than a hundredth of the time."""
    looks = Looks()
    run(looks, 1000, plan=0.0003, right=-0.1)
    assert 0.0003 * len(run(looks, 1000, plan=0.0003, right=-0.1)) < 0.005


def test_one_look_that_brings_more_than_it_takes_is_followed_by_another() -> None:
    looks = Looks()
    run(looks, 1000, plan=0.0003)
    while not looks.due():
        pass
    looks.saw(0.0003, 0.001, right=1.0, alone=True)
    assert looks.due()


def test_what_a_late_look_reads_first_makes_the_next_one_no_later() -> None:
    """Reading takes a hundredth of a step for each token since the last look, whenever that was."""
    looks, last, waits = Looks(), -1, list[int]()
    for step in range(2000):
        if looks.due():
            waits.append(step - last)
            looks.saw(2e-5 + 1e-5 * waits[-1], 0.001, 0.0, alone=True)
            last = step
    assert max(waits) <= 6


@pytest.mark.parametrize(("right", "pays"), [(4.0, True), (0.25, False)])
def test_what_is_right_in_every_fourth_look_drafts_as_often_as_that_pays(right: float, pays: bool) -> None:
    """Four tokens in four looks are worth looks that take a fifth of a step each, and a quarter of one is not."""
    looks, count = Looks(), 0
    for _ in range(1000):
        if looks.due():
            count += 1
            looks.saw(0.00025, 0.001, 0.0 if count % 4 else right)
    assert count > 950 if pays else count < 200


def test_a_try_that_took_longer_than_expected_is_paid_before_the_next() -> None:
    exploration, tried = Exploration(), list[int]()
    for step in range(20_000):
        if explored(exploration, [PLAIN, way("m", 0.5)], 1)[0]:
            tried.append(step)
            exploration.took("m", 3.0, 1.5)
    assert (0.5 + 1.5) * len(tried) / 20_000 == pytest.approx(PROBING, rel=0.1)
