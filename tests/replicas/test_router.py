"""Where a request goes."""

from __future__ import annotations

from foresay.server.replicas.replica import ReplicaLoad, Router

IDLE = {"a": ReplicaLoad(0, 4), "b": ReplicaLoad(0, 4)}
LONG, OTHER = list(range(256)), list(range(1000, 1256))


def test_a_conversation_goes_on_where_it_began():
    router = Router(16)
    first = router.choose(LONG, "", IDLE)
    (other,) = IDLE.keys() - {first}
    busy = {first: ReplicaLoad(2, 4), other: ReplicaLoad(0, 4)}
    assert router.choose([*LONG, *OTHER], "", busy) == first


def test_a_text_that_nobody_knows_goes_to_whom_has_least_to_do():
    assert Router(16).choose(LONG, "", {"a": ReplicaLoad(1, 4), "b": ReplicaLoad(0, 4)}) == "b"
    assert Router(16).choose(LONG, "", {"a": ReplicaLoad(0, 4, unread=9), "b": ReplicaLoad(0, 4)}) == "b"


def test_a_prefix_does_not_make_a_request_wait_for_ever():
    router = Router(16)
    first = router.choose(LONG, "", IDLE)
    (other,) = IDLE.keys() - {first}
    assert router.choose(LONG, "", {first: ReplicaLoad(6, 4), other: ReplicaLoad(0, 4)}) == other


def test_tenants_do_not_see_each_others_prefixes():
    router = Router(16)
    first = router.choose(LONG, "one", IDLE)
    (other,) = IDLE.keys() - {first}
    loads = {first: ReplicaLoad(1, 4), other: ReplicaLoad(0, 4)}
    assert router.choose(LONG, "two", loads) == other
    assert router.choose(LONG, "one", loads | {other: ReplicaLoad(1, 4)}) in (first, other)


def test_what_does_not_fit_is_forgotten_and_so_is_who_is_gone():
    router = Router(16)
    small = {"a": ReplicaLoad(0, 4, pages=16)}
    router.choose(LONG, "", small)
    router.choose(OTHER, "", small)
    router.choose(OTHER, "", small)
    pages = [*router._there["a"]]
    assert len(pages) == 16
    assert router.known("a", list(reversed(pages))) == 16
    router.choose(OTHER, "", {"b": ReplicaLoad(0, 4)})
    assert "a" not in router._there
