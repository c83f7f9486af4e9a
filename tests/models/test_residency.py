"""Who is loaded, who waits, who has to go: the rules alone, without a process."""

from __future__ import annotations

import asyncio
import random
from unittest.mock import AsyncMock

import pytest

from foresay.server.models.residency import NotRestored
from foresay.server.schemas.errors import LoadFailed, Unavailable
from foresay.spec.errors import ConfigurationError
from tests.models.coming import CAPACITY, Comer, World
from tests.provenance import clock

#: Models (name, size, device), how many may be there, who is asked for one after the other, and what happens.
#: A size with a question mark is known to nobody before it was loaded.
ASKED: dict[str, tuple[str, int | None, str, str]] = {
    "on request, and stays": ("a60 b40", None, "aaba", "+a +b"),
    "the least recently used goes": ("a40 b40 c40", None, "abaca", "+a +b -b +c"),
    "as many go as it takes": ("a40 b40 c90", None, "abc", "+a +b -a -b +c"),
    "one says itself that it does not fit": ("a60? b60? c30?", None, "abc", "+a -a +b +c"),
    "each device by itself": ("a90 b90g c90g", None, "abc", "+a +b -b +c"),
    "the largest of all alone": (f"a10 b{CAPACITY + 1}", None, "ab", "+a -a +b"),
    "a number instead of sizes": ("a90 b90 c1", 2, "abc", "+a +b -a +c"),
}


@pytest.mark.parametrize(("models", "most", "asked", "happened"), ASKED.values(), ids=ASKED)
async def test_who_is_loaded_and_who_goes(models, most, asked, happened):
    comers = []
    for name, *size in models.split():
        device = "cuda:0" if size[-1] == "g" else "cpu"
        comers.append(Comer(name, int("".join(size).rstrip("g?")), device, known=size[-1] != "?"))
    world = World(comers, most)
    async with world.running():
        for name in asked:
            world.now += 1
            await world.ask(name)
    assert " ".join(world.happened) == happened


async def test_who_runs_finishes_and_who_comes_then_waits_its_turn():
    world = World([Comer("a"), Comer("b")])
    ended: list[str] = []

    async def ask(name: str, number: int) -> None:
        await world.ask(name)
        ended.append(f"{name}{number}")

    async with world.running():
        async with world.leased("a"):
            other = asyncio.create_task(ask("b", 1))
            await world.settle(lambda: world.residents["a"].state == "leaving")
            late = asyncio.create_task(ask("a", 2))
            await world.settle()
            assert world.happened == ["+a"]
            assert not late.done() and not other.done()
        await asyncio.gather(other, late)
    assert ended == ["b1", "a2"]
    assert world.happened == ["+a", "-a", "+b", "-b", "+a"]


async def test_who_is_idle_goes_before_who_is_busy():
    world = World([Comer("a", 40), Comer("b", 40), Comer("c", 40)])
    async with world.running(), world.leased("a"):
        world.now += 1
        await world.ask("b")
        world.now += 1
        await world.ask("c")
        assert world.happened == ["+a", "+b", "-b", "+c"]


async def test_if_nobody_waits_any_more_nobody_goes():
    world = World([Comer("a"), Comer("b")])
    async with world.running():
        async with world.leased("a"):
            other = asyncio.create_task(world.ask("b"))
            await world.settle(lambda: world.residents["a"].state == "leaving")
            late = asyncio.create_task(world.ask("a"))
            await world.settle()
            other.cancel()
            assert await late == "a"
        await asyncio.gather(other, return_exceptions=True)
        await world.settle()
    assert world.happened == ["+a"]


async def test_everybody_who_waits_is_served_with_one_load():
    world = World([Comer("a"), Comer("b")])
    async with world.running():
        await asyncio.gather(*[world.ask(name) for name in "abababab"])
    assert world.happened == ["+a", "-a", "+b"]


@pytest.mark.parametrize("seed", range(5))
def test_fifty_switches_under_load_lose_nobody_and_starve_nobody(seed):
    chosen = random.Random(seed)
    comers = [Comer("a"), Comer("b"), Comer("c", 50)]
    for comer in comers:
        comer.seconds = 0.001
    world = World(comers)
    most_switches: dict[int, int] = {}

    async def client(number: int) -> int:
        for turn in range(12):
            before = len(world.happened)
            async with world.leased(chosen.choice("abc")):
                most_switches[100 * number + turn] = len(world.happened) - before
                assert sum(world.loaded.values()) <= CAPACITY
                await asyncio.sleep(chosen.random() * 0.003)
            await asyncio.sleep(chosen.random() * 0.003)
        return 12

    async def play() -> list[int]:
        async with world.running():
            answered = await asyncio.gather(*[client(number) for number in range(12)])
            await world.settle()
        return answered

    assert sum(clock.run(play())) == 144
    assert len(world.happened) > 50
    # One may be coming already, and each of the others comes at most once before who waits.
    assert max(most_switches.values()) <= 7
    assert all(not resident.leases and not resident.waiting for resident in world.residents.values())


async def test_a_steady_stream_of_requests_starves_nobody():
    world = World([Comer("a"), Comer("b")])

    async def steadily() -> None:
        while True:
            await world.ask("a", 0.002)

    async with world.running():
        crowd = [asyncio.create_task(steadily()) for _ in range(5)]
        await world.settle(lambda: world.happened == ["+a"])
        await asyncio.wait_for(world.ask("b"), 60)
        await asyncio.wait_for(world.ask("b"), 60)
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    assert world.happened[:3] == ["+a", "-a", "+b"]


# -- how long one stays ----------------------------------------------------------------------------------------------


async def test_a_model_without_requests_leaves_and_comes_again():
    world = World([Comer("a")], keep=10.0)
    async with world.running():
        await world.ask("a")
        world.pass_by(9.0)
        await world.settle()
        assert world.happened == ["+a"]
        assert world.residents["a"].stays(world.now) == 1.0
        world.pass_by(1.0)
        await world.settle()
        assert world.happened == ["+a", "-a"]
        await world.ask("a")
    assert world.happened == ["+a", "-a", "+a"]


async def test_while_a_request_runs_the_model_stays():
    world = World([Comer("a")], keep=10.0)
    async with world.running():
        async with world.leased("a"):
            world.pass_by(100.0)
            await world.settle()
            assert world.residents["a"].stays(world.now) == 10.0
        world.pass_by(9.9)
        await world.settle()
        assert world.happened == ["+a"]


@pytest.mark.parametrize(("keep", "stays"), [(0.0, False), (5.0, False), (20.0, True), (None, True)])
async def test_a_request_may_say_how_long(keep, stays):
    world = World([Comer("a")], keep=10.0)
    async with world.running():
        await world.ask("a", keep=keep)
        await world.settle()
        world.pass_by(15.0)
        await world.settle()
        assert (world.happened == ["+a"]) is stays
        await world.ask("a")
        world.pass_by(15.0)
        await world.settle()
        assert world.happened[-1] == "-a", "the next request says nothing, so the usual time holds again"


async def test_forgotten_it_leaves_at_once_but_not_under_somebodys_feet():
    world = World([Comer("a")])
    async with world.running():
        async with world.leased("a"):
            world.residency.forget(world.residents["a"])
            await world.settle()
            assert world.happened == ["+a"]
        await world.settle()
    assert world.happened == ["+a", "-a"]


# -- what goes wrong -------------------------------------------------------------------------------------------------


async def test_one_that_cannot_be_loaded_is_an_error_and_the_others_go_on():
    broken = Comer("b", 30, wrong="its weights are damaged")
    world = World([Comer("a"), broken])
    async with world.running():
        await world.ask("a")
        for _ in range(2):  # the second time without another trial
            with pytest.raises(LoadFailed, match="'b' could not be loaded: its weights are damaged"):
                await world.ask("b")
            assert broken.state == "out"
        await world.ask("a")
        assert world.happened == ["+a"]
        broken.wrong = None
        world.now += 2.0
        await world.ask("b")
        assert world.residents["b"].failure is None


async def test_trials_that_fail_become_rarer():
    world, pauses = World([Comer("b", wrong="no")]), []
    async with world.running():
        for _ in range(8):
            with pytest.raises(LoadFailed) as refused:
                await world.ask("b")
            pauses.append(refused.value.retry_after)
            world.now = world.residents["b"].refused_until
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


async def test_who_cannot_be_prepared_sends_nobody_away():
    absent = Comer("b")
    absent.unprepared = ConfigurationError("/no/such/model: no such file or directory")
    world = World([Comer("a"), absent])
    async with world.running():
        await world.ask("a")
        refused = await asyncio.gather(*[world.ask("b") for _ in range(3)], return_exceptions=True)
    message = "The model 'b' could not be loaded: /no/such/model: no such file or directory"
    assert [str(one) for one in refused] == [message] * 3
    assert world.happened == ["+a"]


async def test_at_the_end_waiting_requests_fail_and_running_ones_do_not():
    world = World([Comer("a"), Comer("b")])
    async with world.running(), world.leased("a"):
        waiting = asyncio.create_task(world.ask("b"))
        await world.settle()
        world.residency.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting
        with pytest.raises(Unavailable, match="shutting down"):
            await world.ask("b")
        await world.settle()
        assert world.happened == ["+a"]


async def test_a_client_that_leaves_at_the_last_moment_leaves_no_lease_behind():
    world = World([Comer("a")])
    async with world.running():
        for steps in range(12):
            asking = asyncio.create_task(world.ask("a", 10.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert world.residents["a"].leases == 0
            world.residency.forget(world.residents["a"])
            await world.settle()
            assert world.residents["a"].state == "out"


async def test_each_refusal_is_an_error_of_its_own():
    """One that is raised again and again would keep hold of everybody who raised it."""
    world, refusals = World([Comer("b", wrong="no")]), []
    async with world.running():
        for _ in range(3):
            refusals += await asyncio.gather(*[world.ask("b") for _ in range(3)], return_exceptions=True)
        world.residency.close()
        refusals += await asyncio.gather(*[world.ask("b") for _ in range(3)], return_exceptions=True)
    assert len({id(one) for one in refusals}) == 12


# -- other settings --------------------------------------------------------------------------------------------------


async def test_what_runs_goes_on_in_the_next_engine_and_what_comes_waits_for_it():
    world = World([Comer("a", 40)])
    async with world.running(), world.leased("a"):
        world.comers["a"].seconds = 0.01
        reloading = asyncio.create_task(world.reload("a", Comer("a", 80)))
        await world.settle(lambda: world.residents["a"].state == "coming")
        late = asyncio.create_task(world.ask("a"))
        await world.settle()
        assert not late.done() and world.residents["a"].leases == 1
        await reloading
        assert await late == "a" and world.happened == ["+a", "-a", "+a"] and world.loaded == {"cpu": 80}
        assert world.residents["a"].leases == 1


@pytest.mark.parametrize("moves", [True, False])
async def test_settings_that_do_not_load_change_nothing(moves):
    world, other = World([Comer("a", 40)]), Comer("a", 60, wrong="its files are broken")
    async with world.running():
        await world.ask("a")
        with pytest.raises(ConfigurationError, match="broken"):
            await world.reload("a", other, moves)
        await world.ask("a")
        assert world.happened == ["+a", "-a", "+a"] and world.loaded == {"cpu": 40}
        swap = AsyncMock(side_effect=AttributeError("a mistake of ours"))
        with pytest.raises(AttributeError):
            await world.residency.reload(world.residents["a"], swap, moves)
        assert world.residents["a"].state == "out" and await world.ask("a") == "a", "it is loaded again"


async def test_where_nothing_loads_any_more_the_next_request_tries_again():
    world, other = World([Comer("a", 40)]), Comer("a", 60, wrong="its files are broken")
    async with world.running():
        await world.ask("a")
        comer = world.comers["a"]
        comer.wrong = ConfigurationError("so are these")
        with pytest.raises(NotRestored, match="its files are broken"):
            await world.reload("a", other)
        assert comer.state == "out"
        with pytest.raises(LoadFailed, match="so are these"):
            await world.ask("a")
        comer.wrong, world.now = None, comer.refused_until
        await world.ask("a")
    assert world.happened == ["+a", "-a", "+a"]
