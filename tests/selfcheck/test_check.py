"""The server's self-check with an engine whose tokens are written down: who is picked, when it runs, what it counts."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest
from msgspec.structs import replace

from foresay.server.engine.generation import Sink
from foresay.server.metrics import selfcheck
from foresay.server.metrics.records import SelfCheckCounts
from foresay.server.metrics.selfcheck import MOST_ANSWERS
from foresay.server.schemas.errors import EngineFailed, Unavailable
from foresay.spec.request import Request
from tests.provenance import clock
from tests.selfcheck.checking import Diverging, checking, request
from tests.server.scripted import END, INFO, ScriptedEngine
from tests.server.wire import until

TOKENS = [40, 41, 42, 43, 44, 45, 46, 47, 48]

pytestmark = pytest.mark.usefixtures("impatient")


def checks(engine: ScriptedEngine) -> list[Request]:
    return [one for one in engine.requests if one.aside]


@clock.jumping
async def test_every_answer_is_compared_token_by_token() -> None:
    engine = ScriptedEngine(TOKENS, run=3)
    async with checking(engine) as checker:
        await checker.ask(request("a"), request("b", max_tokens=20, seed=5))
        await checker.ask(request("c", max_tokens=1))
        await checker.settled(3)
    assert checker.counts == SelfCheckCounts(share=1.0, self_check_requests=3, self_check_tokens=12 + 20 + 1)
    for sent, again in zip(engine.requests[:3], checks(engine), strict=True):
        assert (again.prompt, again.params.max_tokens) == (sent.prompt, sent.params.max_tokens)
        assert not again.speculate
    assert [again.params.seed for again in checks(engine)] == [7, 5, 7], "the one that was drawn, the one asked for"


@clock.jumping
async def test_a_difference_is_counted_and_warned_of_without_a_text(caplog: pytest.LogCaptureFixture) -> None:
    async with checking(Diverging(TOKENS, run=3)) as checker:
        with caplog.at_level(logging.WARNING, "foresay.selfcheck"):
            await checker.ask(request("cmpl-1", seed=3, max_tokens=9))
            await checker.settled(1)
    assert checker.counts == SelfCheckCounts(
        share=1.0, self_check_requests=1, self_check_tokens=6, self_check_mismatch=1
    )
    assert caplog.messages == [
        "self-check: request cmpl-1 (X-Request-Id -, seed 3) differs at output position 5: "
        "plain decoding writes another token, on this machine, which claims to be exact"
    ]


@clock.jumping
async def test_a_plain_text_that_ends_before_is_a_difference(caplog: pytest.LogCaptureFixture) -> None:
    class Ending(ScriptedEngine):
        def script_of(self, request: Request) -> list[int]:
            return self.tokens if request.speculate else [*self.tokens[:4], END]

    async with checking(Ending(TOKENS, run=2)) as checker:
        with caplog.at_level(logging.WARNING, "foresay.selfcheck"):
            await checker.ask(request("a", max_tokens=9))
            await checker.settled(1)
    assert (checker.counts.self_check_mismatch, checker.counts.self_check_tokens) == (1, 5)
    assert "differs at output position 4: plain decoding writes another token" in caplog.text


@clock.jumping
async def test_the_configured_share_is_picked() -> None:
    engine = ScriptedEngine(TOKENS, run=9)
    async with checking(engine, 0.25, random.Random(8).random) as checker:
        for number in range(200):
            await checker.ask(request(f"r{number}", max_tokens=9))
            if number % 40 == 39:
                await until(lambda: not checker.counts.self_check_waiting)
    drawn = random.Random(8)
    expected = sum(drawn.random() < 0.25 for _ in range(200))
    assert 30 < expected < 70
    assert (checker.counts.self_check_requests, len(checks(engine))) == (expected, expected)


@clock.jumping
async def test_it_waits_until_nobody_needs_the_engine() -> None:
    engine = ScriptedEngine(TOKENS, run=9, pause=0.02)
    async with checking(engine) as checker:
        running = checker.begin(request("long", max_tokens=200))
        short = checker.begin(request("short", max_tokens=3))
        await short.over.wait()
        await asyncio.sleep(0.1)
        assert (checks(engine), checker.counts.self_check_waiting) == ([], 1)
        await running.over.wait()
        checker.idle.set()
        await checker.settled(2)
    assert [len(again.prompt) for again in checks(engine)] == [3, 3]


@clock.jumping
async def test_it_waits_until_nothing_has_come_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "QUIET_SECONDS", 0.4)
    engine = ScriptedEngine(TOKENS, run=9)
    async with checking(engine) as checker:
        for number in range(6):
            await checker.ask(request(f"r{number}"))
            await asyncio.sleep(0.3)
        assert (checks(engine), checker.counts.self_check_waiting) == ([], 6)
        await checker.settled(6)


@pytest.mark.parametrize("times", [1, 3])
@clock.jumping
async def test_a_request_that_comes_ends_the_re_run_first_and_it_is_made_later(times: int) -> None:
    engine = ScriptedEngine(TOKENS, run=1, pause=0.005)
    async with checking(engine) as checker:
        await checker.ask(request("a", max_tokens=60))
        for number in range(times):
            while len(long := [again.id for again in checks(engine) if again.params.max_tokens == 60]) <= number:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.03)
            reader = checker.begin(request(f"b{number}", max_tokens=2))
            assert engine.cancelled[-1] == long[-1], "cancelled before the request is handed to the engine"
            assert engine.requests[-1].id == f"b{number}"
            await reader.over.wait()
            checker.idle.set()
        await checker.settled(times + 1)
    assert checker.counts == SelfCheckCounts(share=1.0, self_check_requests=times + 1, self_check_tokens=times * 2 + 60)
    ids = [again.id for again in checks(engine)]
    assert len(set(ids)) == len(ids), "nothing that is still under way can be taken for the next one"


@clock.jumping
async def test_cancelled_and_failed_requests_are_not_checked() -> None:
    engine = ScriptedEngine(TOKENS, run=2, pause=0.01)
    async with checking(engine) as checker:
        checker.begin(request("gone"))
        await asyncio.sleep(0.03)
        checker.engine.cancel("gone")
        engine.fail_after = 4
        [broken] = await checker.ask(request("broken"))
        assert isinstance(broken.error, EngineFailed)
        engine.fail_after = None
        await checker.ask(request("good"))
        await checker.settled(1)
    assert (checker.counts.self_check_requests, [again.params.max_tokens for again in checks(engine)]) == (1, [12])


@clock.jumping
async def test_a_re_run_that_dies_with_the_engine_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(TOKENS, run=2)
    async with checking(engine) as checker:
        engine.pause = 0.01
        await checker.ask(request("a"), request("b"))
        engine.fail_after = 6
        await checker.settled(1)
        engine.fail_after = None
        await checker.settled(2)
    assert checker.counts == SelfCheckCounts(
        share=1.0, self_check_requests=1, self_check_tokens=12, self_check_skipped=1
    )
    assert caplog.messages == []


@clock.jumping
async def test_while_no_engine_is_there_the_answers_wait() -> None:
    class Down(ScriptedEngine):
        down = False

        def add(self, request: Request, sink: Sink) -> None:
            if self.down:
                raise Unavailable("The engine is down", "engine_down")
            super().add(request, sink)

    engine = Down(TOKENS)
    async with checking(engine) as checker:
        checker.taking = False
        await checker.ask(request("a"))
        await asyncio.sleep(0.1)
        assert (checks(engine), checker.counts.self_check_waiting) == ([], 1)
        checker.taking, engine.down = True, True  # it dies between the look and the request
        await asyncio.sleep(0.1)
        assert (checker.counts.self_check_waiting, checker.counts.self_check_skipped) == (1, 0)
        engine.down = False
        await checker.settled(1)
    assert checker.counts == SelfCheckCounts(share=1.0, self_check_requests=1, self_check_tokens=12)


@clock.jumping
async def test_too_many_answers_are_skipped() -> None:
    engine = ScriptedEngine(TOKENS, run=9)
    async with checking(engine) as checker:
        await checker.ask(*(request(f"r{number}", prompt=[number]) for number in range(100)))
        counts, parts = checker.counts, (MOST_ANSWERS, 100 - MOST_ANSWERS)
        assert (counts.self_check_waiting, counts.self_check_skipped) == parts
        await until(lambda: not checker.counts.self_check_waiting)
    assert (counts.self_check_requests, counts.self_check_skipped) == parts
    assert [again.prompt for again in checks(engine)] == [[number] for number in range(100)][-MOST_ANSWERS:]


@clock.jumping
async def test_what_other_weights_wrote_is_not_checked() -> None:
    engine = ScriptedEngine(TOKENS, run=9, pause=0.02)
    async with checking(engine) as checker:
        checker.begin(request("waits", max_tokens=3))
        late = checker.begin(request("late", max_tokens=60))
        await until(lambda: checker.counts.self_check_waiting == 1)
        engine.info = replace(INFO, identity={"weights": "others"})
        await late.over.wait()
        await checker.ask(request("new", max_tokens=4))
        await checker.settled(3)
    assert checker.counts == SelfCheckCounts(
        share=1.0, self_check_requests=1, self_check_tokens=4, self_check_skipped=2
    )
