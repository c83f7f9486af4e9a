from __future__ import annotations

import random

import msgspec

from foresay.server.api.responses.items import given_items
from foresay.server.api.responses.schemas import OutputMessage, OutputText, Reasoning, Response, TextOptions
from foresay.server.api.responses.store import Record, ResponseStore, StoreLimits


def record(tenant: str, id: str, text: str = "x") -> Record:
    response = Response(
        id=id,
        created_at=0,
        status="completed",
        model="toy",
        output=[OutputMessage(id="msg", status="completed", content=[OutputText(text=text)])],
        reasoning=Reasoning(),
        temperature=1.0,
        top_p=1.0,
        text=TextOptions(),
    )
    return Record(tenant=tenant, response=response, items=tuple(given_items(text)))


async def test_a_tenant_never_finds_anothers():
    store = ResponseStore()
    store.keep(record("a", "r"))
    assert store.find("a", "r") is not None
    assert store.find("b", "r") is None
    assert not store.drop("b", "r")
    assert store.drop("a", "r") and not store.drop("a", "r")
    assert (len(store), store.bytes) == (0, 0)


async def test_the_least_recently_used_goes_first():
    store = ResponseStore(StoreLimits(count=3))
    for id in "abc":
        store.keep(record("t", id))
    store.find("t", "a")
    store.keep(record("t", "d"))
    assert [id for id in "abcd" if store.find("t", id)] == ["a", "c", "d"]


async def test_what_one_socket_keeps_is_found_there_only():
    store, here = ResponseStore(StoreLimits(count=3)), {"socket_id": "socket"}
    store.keep(msgspec.structs.replace(record("t", "hidden"), **here))
    store.keep(record("t", "shown"))
    assert [store.find("t", "hidden", place) is not None for place in ("", "other", "socket")] == [False, False, True]
    assert store.find("t", "shown", "socket") is not None
    assert store.find("u", "hidden", "socket") is None
    store.forget("t", "socket")
    assert store.find("t", "hidden", "socket") is None and store.find("t", "shown") is not None
    store.forget("u", "socket")


async def test_bounds_hold_whatever_happens():
    rng = random.Random(1)
    limits = StoreLimits(count=12, bytes=40_000)
    store = ResponseStore(limits)
    for _ in range(2000):
        tenant, id = rng.choice("abcd"), str(rng.randrange(20))
        match rng.randrange(4):
            case 0:
                store.drop(tenant, id)
            case 1:
                store.find(tenant, id)
            case _:
                store.keep(record(tenant, id, "x" * rng.randrange(6000)))
        kept = list(store._records.values())
        assert (len(store), store.bytes) == (len(kept), sum(one.size for one in kept))
        assert len(store) <= limits.count and store.bytes <= limits.bytes


async def test_a_record_larger_than_the_bound_is_not_kept():
    store = ResponseStore(StoreLimits(bytes=2000))
    store.keep(record("t", "small"))
    store.keep(record("t", "large", "x" * 5000))
    assert store.find("t", "large") is None
