"""Who is at rest is asked now and then: how seldom, in what order, and at once after a surprise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spec.budget.cost import DraftCost
from spec.budget.members import Member
from spec.budget.probes import PROBING, Probes
from spec.budget.weigh import Grove, Offer, Taken
from spec.protocols import FeatureRequest
from spec.sequence import Sequence as Running
from spec.tree import DraftTree, TreeShape

#: Seconds of a step by its rows: all alike, so that only drafting costs anything.
FLAT = [1.0] * 100
PLAIN = Taken("", (0,), (0,), 1.0, 1.0)


class Named:
    """Implements :class:`spec.protocols.Drafter`, and is only ever a name here."""

    needs: FeatureRequest | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, sequences: Sequence[Running], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        raise AssertionError("nobody drafts here")

    def extend(self, sequence: Running) -> None: ...

    def committed(self, sequence: Running, path: list[int]) -> None: ...

    def finished(self, sequence: Running) -> None: ...


def model(name: str, seconds: float = 0.0, token: float = 0.0) -> Member:
    return Member.model(Named(name), DraftCost(seconds, 0.0, token))


def asked(
    probes: Probes, models: Sequence[Member], offer: Offer, steps: int, best: Taken = PLAIN
) -> list[Taken | None]:
    """What each of so many steps did in the place of the best way; None for that itself."""

    def drafting(name: str, levels: float, nodes: float) -> float:
        return next(m for m in models if m.name == name).cost.seconds(levels)

    done = []
    for _ in range(steps):
        way = probes.due(models, best, [offer], drafting, FLAT, False)
        done.append(None if way is best else way)
    return done


@pytest.mark.parametrize(("first", "quarters"), [(0.5, 4), (0.3, 4), (0.15, 2), (0.01, 1)])
def test_what_asking_loses_stays_below_its_share_which_is_smaller_without_hope(first: float, quarters: int) -> None:
    done = asked(Probes(), [model("m", seconds=0.5)], Offer(models={"m": [first] * 5}), 4000)
    lost = 0.5 * sum(way is not None for way in done)
    assert lost / 4000 == pytest.approx(PROBING * quarters / 4, rel=0.15)


def test_a_draft_without_hope_is_of_one_level() -> None:
    levels = [
        next(way.levels for way in asked(Probes(), [model("m", 0.2)], Offer(models={"m": [first] * 5}), 900) if way)
        for first in (0.05, 0.5)
    ]
    assert levels == [(1,), (3,)]


def test_a_cheap_one_does_not_spend_what_was_saved_for_a_dear_one() -> None:
    cheap, dear = model("cheap", seconds=0.2), model("dear", seconds=2.0)
    done = asked(Probes(), [cheap, dear], Offer(models={"cheap": [0.5], "dear": [0.5]}), 3000)
    names = [way.model for way in done if way is not None]
    assert names.count("dear") >= 3000 * PROBING / 2.0 - 2
    assert names.count("cheap") > 5 * names.count("dear")


def test_reading_what_was_written_meanwhile_is_paid_beside_the_share() -> None:
    """What has to be read grows as fast as a hopeless one's share: without more it would never be asked."""
    member = model("m", seconds=0.5, token=PROBING / 4)
    rest = 0

    def drafting(name: str, levels: float, nodes: float) -> float:
        return member.cost.seconds(levels, rest)

    probes, count = Probes(), 0
    for _ in range(2000):
        rest += 1
        if probes.due([member], PLAIN, [Offer(models={"m": [0.01]})], drafting, FLAT, False) is not PLAIN:
            rest, count = 0, count + 1
    assert count >= 4


def test_whoever_was_right_is_asked_again_at_once() -> None:
    probes, member, offer = Probes(), model("m", seconds=5.0), Offer(models={"m": [0.1]})
    assert asked(probes, [member], offer, 1) == [None]
    probes.surprised("m")
    first, second = asked(probes, [member], offer, 2)
    assert first is not None
    assert first.model == "m"
    assert second is None


def test_all_other_trees_of_the_one_that_drafts_have_their_turn() -> None:
    member = model("m")
    shapes = [bush.shape for bush in member.bushes]
    trees = {shape: Grove(1.0 + index, 3.0, 2.0) for index, shape in enumerate(shapes)}
    best = Taken("m", (0,), (shapes[1].levels,), 2.0, 1.0, shapes[1])
    done = asked(Probes(), [member], Offer(models={"m": [0.5] * 6}, trees={"m": trees}), 400, best)
    seen = [way.tree for way in done if way is not None]
    assert set(seen) == {shape for shape in shapes if shape is not shapes[1]}
    assert len(seen) < 400 / 10, "cheap as it is, it is no way of its own"
