"""Who is at rest is asked now and then: how seldom, in what order, and at once after a surprise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spec.budget.cost import DraftCost
from spec.budget.members import Member
from spec.budget.probes import PROBING, Probes, allowances
from spec.budget.ways import DraftSeconds, Grove, Offer, Taken
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

    def drafting(name: str, levels: float, nodes: float, grown: bool = False) -> float:
        return next(m for m in models if m.name == name).cost.seconds(levels)

    ways = [step(probes, models, best, offer, drafting) for _ in range(steps)]
    return [None if way is best else way for way in ways]


def step(
    probes: Probes,
    models: Sequence[Member],
    best: Taken,
    offer: Offer,
    drafting: DraftSeconds,
    pinned: TreeShape | None = None,
) -> Taken:
    """What is done in one step."""
    due = probes.save(allowances(models, best, [offer]))
    return probes.due(models, best, [offer], drafting, FLAT, pinned) if due else best


@pytest.mark.parametrize(("first", "quarters"), [(0.5, 4), (0.3, 4), (0.15, 2), (0.01, 1)])
def test_what_asking_loses_stays_below_its_share_which_is_smaller_without_hope(first: float, quarters: int) -> None:
    done = asked(Probes(), [model("m", seconds=0.5)], Offer(models={"m": [first] * 5}), 8000)
    lost = 0.5 * sum(way is not None for way in done)
    assert lost / 8000 == pytest.approx(PROBING * quarters / 4, rel=0.15)


def test_for_a_model_that_has_nothing_to_say_nothing_is_saved() -> None:
    """Of a request that names its drafter, say: what another one saved meanwhile would be spent in the next request."""
    probes, silent, other = Probes(), model("silent", seconds=0.5), model("other", seconds=0.5)
    assert not any(probes.save(allowances([silent], PLAIN, [Offer()])) for _ in range(2000))
    assert asked(probes, [silent], Offer(models={"silent": [0.5] * 5}), 50) == [None] * 50
    alone = asked(Probes(), [silent, other], Offer(models={"other": [0.5] * 5}), 1000)
    assert sum(way is not None for way in alone) == pytest.approx(1000 * PROBING / 0.5, abs=1), (
        "it has all of the share"
    )


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
    assert names.count("dear") >= 3000 * PROBING / 2 / 2.0 - 1, "each has half of the share"
    assert names.count("cheap") > 5 * names.count("dear")


@pytest.mark.parametrize("token", [PROBING / 4, PROBING])
def test_reading_what_was_written_meanwhile_is_paid_beside_the_share(token: float) -> None:
    """What has to be read grows as fast as a hopeless one's share, or faster: without more it would never be asked."""
    member = model("m", seconds=0.1, token=token)
    rest = 0

    def drafting(name: str, levels: float, nodes: float, grown: bool = False) -> float:
        return member.cost.seconds(levels, rest)

    probes, count = Probes(), 0
    for _ in range(2000):
        rest += 1
        if step(probes, [member], PLAIN, Offer(models={"m": [0.01]}), drafting) is not PLAIN:
            rest, count = 0, count + 1
    assert count >= 10


def test_whoever_was_right_is_asked_again_at_once_unless_that_takes_long_or_the_text_is_another() -> None:
    probes, offer = Probes(), Offer(models={"m": [0.1]})
    member = model("m", seconds=0.9)
    assert asked(probes, [member], offer, 1) == [None]
    probes.surprised("m")
    first, second = asked(probes, [member], offer, 2)
    assert first is not None
    assert first.model == "m"
    assert second is None
    probes.surprised("m")
    probes.ended()
    assert asked(probes, [member], offer, 1) == [None]
    probes.surprised("m")
    assert asked(probes, [model("m", seconds=1.1)], offer, 1) == [None]


def test_whoever_leads_by_now_is_not_asked_to_be_seen() -> None:
    member, probes = model("m", seconds=0.5), Probes()
    trees = {"m": Grove(2.0, 3.0, 2.0)}
    best = Taken("m", (0,), (6,), 3.0, 1.0)
    probes.surprised("m")
    assert asked(probes, [member], Offer(models={"m": [0.5]}, trees=trees), 1, best) == [None]


def test_a_probe_beside_found_nodes_asks_nobody_else() -> None:
    """The draft model leads; asking the head in its place loses what the draft model would have brought."""
    head, probes = model("head", seconds=0.01), Probes()
    best = Taken("draft", (2,), (3,), 4.0, 2.0)
    offer = Offer(found=[0.5, 0.25], first=0.5, models={"draft": [0.9, 0.8, 0.7], "head": [0.5]})
    done = asked(probes, [head], offer, 600, best)
    way = next(way for way in done if way is not None)
    assert (way.model, way.found, way.tokens) == ("head", (2,), 1.75)
    lost = way.seconds - way.tokens / best.pace
    assert sum(way is not None for way in done) == pytest.approx(600 * PROBING * best.seconds / max(lost, 0.2), rel=0.1)


def test_a_pinned_probe_is_the_pinned_shape_and_nothing_beside() -> None:
    pinned, member = TreeShape.chain(4), model("m", seconds=0.2)
    offer = Offer(found=[0.5], first=0.5, models={"m": [0.5] * 8})
    best, probes = Taken("", (1,), (0,), 1.5, 1.0), Probes()
    ways = [step(probes, [member], best, offer, lambda *_: 0.2, pinned) for _ in range(500)]
    taken = next(way for way in ways if way is not best)
    assert (taken.found, taken.levels) == ((0,), (4,))
