from __future__ import annotations

import asyncio
import random

import msgspec

from foresay.server.api.common.kept import StoreLimits
from foresay.server.api.responses.events import ResponseCompleted
from foresay.server.api.responses.items import given_items
from foresay.server.api.responses.schemas import OutputMessage, OutputText, Reasoning, Response, TextOptions
from foresay.server.api.responses.store import Record, ResponseStore


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


async def test_one_tenant_cannot_push_out_anothers():
    for limits in (StoreLimits(count=4), StoreLimits(bytes=4 * record("loud", "00").measured())):
        store = ResponseStore(limits)
        store.keep(record("quiet", "q"))
        for number in range(50):
            store.keep(record("loud", str(number)))
        assert store.find("quiet", "q") is not None
        assert len(store) == 4
    loud = [id for id in range(50) if store.find("loud", str(id))]
    assert loud == [47, 48, 49]


async def test_what_one_socket_keeps_is_found_there_only_and_counts_as_its_keys():
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
        kept = [one for tenant in "abcd" for one in store.of(tenant)]
        assert (len(store), store.bytes) == (len(kept), sum(one.size for one in kept))
        assert len(store) <= limits.count and store.bytes <= limits.bytes


async def test_a_record_larger_than_the_bound_is_not_kept():
    store = ResponseStore(StoreLimits(bytes=2000))
    store.keep(record("t", "small"))
    store.keep(record("t", "large", "x" * 5000))
    assert store.find("t", "large") is None


async def test_the_size_covers_the_whole_conversation():
    one = record("t", "r", "x" * 1000)
    assert one.measured() >= len(msgspec.json.encode(one.response)) + 1000


async def test_events_that_are_made_in_a_thread_are_heard_of():
    one = record("t", "r")
    first = one.changed
    heard = asyncio.create_task(one.changed.wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(one.note, ResponseCompleted(response=one.response))
    await asyncio.wait_for(heard, 60)
    assert len(one.events) == 1 and first.is_set() and not one.changed.is_set()
