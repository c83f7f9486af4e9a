"""Requests are kept by key, and no key sees another's."""

from __future__ import annotations

from itertools import count

from foresay.server.observe.telemetry.request_stats import MOST_PER_TENANT, Recent, RequestStats, SharedStats
from foresay.server.text.choice import Piece
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams


def stats(tenant: str, id: str, text: str = "") -> RequestStats:
    ticks = count(1_000.0)
    entry = RequestStats(
        Request(id=id, prompt=[1], params=SamplingParams()), tenant, "", SharedStats(lambda: next(ticks))
    )
    entry.kept(Delta(id=id, tokens=[1]), Piece(text=text, token_ids=[1], offsets=[0]))
    return entry


def keep(recent: Recent, *all_stats: RequestStats) -> None:
    for entry in all_stats:
        recent.begin(entry)
        recent.end(entry)


def ids(recent: Recent, tenant: str) -> list[str]:
    return [entry.id for entry in recent.of(tenant)]


def test_each_key_sees_its_own_the_newest_first_and_what_runs_before_that() -> None:
    recent = Recent()
    keep(recent, stats("a", "1"), stats("b", "2"), stats("a", "3"))
    recent.begin(stats("a", "4"))
    assert (ids(recent, "a"), ids(recent, "b"), ids(recent, "c")) == (["4", "3", "1"], ["2"], [])
    assert recent.find("a", "2") is None and recent.find("b", "4") is None
    assert recent.find("b", "2") is not None and recent.find("a", "4") is not None
    assert recent.running == 1


def test_the_oldest_of_a_key_makes_room() -> None:
    recent = Recent()
    keep(recent, stats("b", "b"), *(stats("a", str(number)) for number in range(MOST_PER_TENANT + 3)))
    assert len(ids(recent, "a")) == MOST_PER_TENANT
    assert recent.find("a", "2") is None and recent.find("a", "3") is not None
    assert ids(recent, "b") == ["b"]


def test_the_memory_of_all_keys_is_bounded() -> None:
    recent = Recent(most_bytes=100_000)
    keep(recent, *(stats(str(number), str(number), text="x" * 9_000) for number in range(40)))
    kept = [number for number in range(40) if ids(recent, str(number))]
    assert kept == list(range(40 - len(kept), 40)) and 5 <= len(kept) <= 11
