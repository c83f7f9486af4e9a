"""Replicas that are killed, ended and replaced under streams: real engine processes, the same texts, nothing lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from foresay.server.engine.generation import Generation
from foresay.server.replicas.fleet import Fleet
from foresay.spec.request import Delta, Request
from tests.replicas.local import ASKED, CONFIG, SECONDS, Local, asking, text, written
from tests.server.patched import PACED, existing, patch_engines

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes the engines slow, or holds them."""
    return tmp_path_factory.mktemp("paced")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[Local]:
    """Two replicas, of which there are two again at the end of each test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_engines(PACED, folder, monkeypatch)
        async with Local() as cluster:
            await cluster.start("a", "b")
            yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(cluster: Local) -> dict[str, list[int]]:
    """The texts where nobody disturbs."""
    async with asking(cluster) as fleet:
        return {request.id: text(await written(fleet, request)) for request in ASKED}


async def disturbed(
    fleet: Fleet, folder: Path, disturb: Callable[[], Awaitable[None]]
) -> tuple[dict[str, list[int]], list[int]]:
    """The texts of streams that were disturbed when all had begun, and how often each was resumed. folder: of a file
    that makes their engines slow until then."""
    begun = [asyncio.Event() for _ in ASKED]
    tasks = [asyncio.create_task(written(fleet, *each)) for each in zip(ASKED, begun, strict=True)]
    async with asyncio.timeout(SECONDS):
        with existing(folder / "slow"):
            await asyncio.gather(*[each.wait() for each in begun])
            await disturb()
        all_deltas = await asyncio.gather(*tasks)
    resumed = [len(deltas[-1].ending.resumed) for deltas in all_deltas if deltas[-1].ending is not None]
    return {request.id: text(deltas) for request, deltas in zip(ASKED, all_deltas, strict=True)}, resumed


async def test_what_ran_in_a_replica_that_is_killed_goes_on_in_another(cluster, expected, folder):
    async def kill() -> None:
        for hosted in cluster.hosted.values():
            if hosted.load:
                os.kill(hosted.process_id, signal.SIGKILL)
                return

    async with asking(cluster) as fleet:
        texts, resumed = await disturbed(fleet, folder, kill)
        assert texts == expected
        assert any(resumed) and fleet.status.state == "ready"
        async with asyncio.timeout(SECONDS):
            while len(fleet.ready) < 2:  # the engine of a replica is started again there
                await asyncio.sleep(0.02)


async def test_streams_wait_where_all_are_killed_and_so_does_a_request_that_was_being_prepared(
    cluster, expected, folder
):
    late: list[asyncio.Task[list[Delta]]] = []
    async with asking(cluster) as fleet:

        async def kill() -> None:
            with existing(folder / "held"):
                for hosted in cluster.hosted.values():
                    os.kill(hosted.process_id, signal.SIGKILL)
                while fleet.status.state == "ready":
                    await asyncio.sleep(0.01)
            late.append(asyncio.create_task(written(fleet, replace(ASKED[0], id="late"))))
            await asyncio.sleep(0)

        texts, resumed = await disturbed(fleet, folder, kill)
        assert text(await late[0]) == expected[ASKED[0].id]
    assert texts == expected
    assert all(resumed)


async def test_what_ran_in_a_replica_that_answers_nothing_goes_on_in_another(cluster, expected, folder, monkeypatch):
    async def freeze() -> None:
        frozen = max(cluster.hosted.values(), key=lambda hosted: hosted.load)
        for door in frozen._connections.values():
            monkeypatch.setattr(door, "send", lambda frame: None)

    async with asking(cluster) as fleet:
        texts, resumed = await disturbed(fleet, folder, freeze)
    assert texts == expected
    assert any(resumed)


async def test_a_replica_that_is_to_end_is_left_at_once(cluster, expected, folder, monkeypatch):
    monkeypatch.setattr("foresay.server.replicas.fleet.LOOK_SECONDS", 0.02)  # before the streams are over
    async with asking(cluster) as fleet:

        async def leave() -> None:
            name = max(cluster.hosted, key=lambda name: cluster.hosted[name].load)
            hosted = cluster.hosted.pop(name)
            while name in {replica.address.name for replica in fleet.ready}:
                await asyncio.sleep(0.02)
            await hosted.close()

        texts, resumed = await disturbed(fleet, folder, leave)
    await cluster.start("e")
    assert texts == expected
    assert any(resumed)


async def test_two_front_doors_whose_requests_are_called_alike(cluster, expected):
    async with asking(cluster) as one, asking(cluster) as two:
        both = await asyncio.gather(*[written(door, request) for door in (one, two) for request in ASKED])
    assert [text(deltas) for deltas in both] == [*expected.values()] * 2


async def test_requests_of_a_front_door_end_with_it(cluster):
    short = [replace(request, params=replace(request.params, max_tokens=3)) for request in ASKED]
    async with asking(cluster) as fleet, asking(cluster) as other, Generation(fleet, ASKED) as generation:
        await generation.next()
        for replica in fleet.ready:
            fleet._leave(replica)  # its connection is closed, without a word
        async with asyncio.timeout(SECONDS):
            while any(hosted.load for hosted in cluster.hosted.values()):  # as of the last step that each took
                await asyncio.gather(*[written(other, request) for request in short])


async def test_a_replica_with_another_secret_is_left_out(cluster, caplog):
    address = next(iter(cluster.hosted.values())).address
    cluster.wrong["c"] = replace(address, name="c", secret=b"another")
    async with asking(cluster) as fleet:
        async with asyncio.timeout(SECONDS):
            while "the replica c cannot be reached" not in caplog.text:
                await asyncio.sleep(0.02)
        assert {replica.address.name for replica in fleet.ready} == set(cluster.hosted)
    del cluster.wrong["c"]


async def test_choices_of_one_prompt_stay_together_and_others_spread(cluster):
    one = [replace(ASKED[0], id="x"), replace(ASKED[0], id="y", fork_of="x")]
    other = Request(id="z", prompt=[9, 9], params=ASKED[0].params)
    async with asking(cluster) as fleet, Generation(fleet, [*one, other]) as generation:
        await generation.next()
        where = {id: replica.address.name for id in "xyz" for replica in fleet.ready if id in replica.in_flight}
    assert where["x"] == where["y"] != where["z"]


async def test_a_rolling_update_to_another_draft_loses_nothing(cluster, expected, folder):
    """The last one: those that were there are gone then."""
    drafted = replace(CONFIG, draft="bundled")
    await cluster.start("c", "d", config=drafted, deployed=2)
    async with asking(cluster) as fleet:

        async def update() -> None:
            await fleet.replace(drafted)

        texts, resumed = await disturbed(fleet, folder, update)
        assert fleet.info is not None and fleet.info.drafter.startswith("draft_model")
    assert texts == expected
    assert all(resumed)
