"""The engine process started, killed and left behind: real processes and signals; and when one is given up."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from foresay.server.cli import serving
from foresay.server.cli.main import main
from foresay.server.engine.generation import EngineStatus, Mailbox, generate
from foresay.server.engine_process import child
from foresay.server.engine_process.child import LOOKS, SLOW_FACTOR, STOPPED, Watchdog
from foresay.server.engine_process.client import EngineClient
from foresay.server.schemas.errors import Mistake
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams

SECONDS = 180.0
#: One that is soon there: no draft model, a short context.
QUICK: dict[str, Any] = {"draft": "none", "max_model_len": 256, "max_seqs": 1}


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[tuple[EngineClient, list[EngineStatus]]]:
    """An engine client that has been started, and every status it has had."""
    engine, seen = EngineClient(ServeConfig(**QUICK | settings)), []
    engine.observe_status = [seen.append]
    await engine.start()
    try:
        yield engine, seen
    finally:
        await engine.stop()


def causes(seen: list[EngineStatus]) -> list[str]:
    return [status.cause for status in seen if status.cause is not None]


@contextmanager
def no_more_files() -> Iterator[None]:
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_an_engine_that_could_not_be_started_is_started_again(caplog):
    with no_more_files():
        async with asyncio.timeout(SECONDS):
            engine = EngineClient(ServeConfig(**QUICK))
            await engine.start()
            while engine.status.state != "down":
                await asyncio.sleep(0.01)
    assert "Too many open files" in engine.status.message
    assert "could not be started" in caplog.text and "Traceback" not in caplog.text
    try:
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        assert engine.status.starts == 2
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_modules_where_the_user_happens_to_be_are_none_of_ours(tmp_path, monkeypatch):
    for name in ("server", "torch", "msgspec", "spec", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} of the working directory')")
    monkeypatch.chdir(tmp_path)
    async with started(target=os.path.relpath(BUNDLED / "target")) as (engine, _):
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        assert engine.status.starts == 1


def test_a_server_whose_supervision_ends_ends_too(monkeypatch, capsys, caplog):
    async def broken(self: EngineClient) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(EngineClient, "_supervise", broken)
    monkeypatch.setattr(serving, "_leave_the_busy", lambda: None)  # this process goes on when its tokenizer is loaded
    assert main(["serve", "--port", "0"]) == 1
    assert "the supervision of the engine ended (KeyError: 'lost')" in capsys.readouterr().err
    assert "the engine is no longer supervised" in caplog.text


@pytest.mark.parametrize("down", [False, True])
async def test_a_crash_while_the_next_process_imports_is_no_end(down, monkeypatch):
    """down: the engine is gone already, and its supervisor waits to start it again."""
    engine, spawned = EngineClient(ServeConfig(**QUICK), lambda: spawned.pop()), [Mock(), ahead := Mock()]
    engine._set(EngineStatus("down" if down else "ready"))
    monkeypatch.setattr(child, "has_imported", lambda process: setattr(engine, "_ahead", None))
    monkeypatch.setattr(engine, "until_ready", AsyncMock())
    monkeypatch.setattr(engine, "_supervise", AsyncMock())
    async with asyncio.timeout(SECONDS):
        await engine.reload(ServeConfig(**QUICK, page_size=32))
    assert spawned != [ahead] and engine._config.page_size == 32


class Breaking(Mailbox):
    """A sink that raises at its third delta."""

    def put(self, delta: Delta) -> None:
        if sum(map(len, (one.tokens for one in self._pending))) > 1:
            raise KeyError("a mistake of ours")
        super().put(delta)


def failing(seen: list[Any]) -> Callable[[Any], None]:
    """An observer that always raises."""

    def observe(what: Any) -> None:
        seen.append(what)
        raise KeyError("a mistake of ours")

    return observe


@pytest.mark.slow
async def test_an_observer_that_fails_is_not_taken_for_the_engine(caplog):
    steps: list[Any] = []
    statuses: list[Any] = []
    async with started(max_seqs=2) as (engine, seen):
        engine.observe, engine.observe_status = failing(steps), [failing(statuses), seen.append]
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        requested = Request(id="broken", prompt=[5, 6], params=params)
        broken = Breaking(engine, requested, asyncio.Event(), 99, lambda tokens: None, lambda: None)
        engine.add(broken.request, broken)
        other = Request(id="other", prompt=[5, 6, 7], params=params)
        assert sum([len(delta.tokens) async for delta in generate(engine, other)]) == 20
        assert isinstance(broken.error, Mistake)
        assert engine.status.starts == 1 and causes(seen) == [], "no engine was replaced"
    assert len(steps) >= 20 and statuses
    assert caplog.text.count("Traceback") == 3, "of each observer and the sink once"


# -- given up, by frames and CPU time alone, at looks that are 1 s apart -----------------------------------------------


LONG = LOOKS * SLOW_FACTOR


def looks(most: int, heard: bool = False, busy: bool = False, loading: bool = False) -> tuple[int, str | None]:
    """Looks until the engine is given up, and why; ``most`` if it is not."""
    watchdog, ticks = Watchdog(float(LOOKS)), count()
    for look in range(1, most + 1):
        if (why := watchdog.look(heard, next(ticks) if busy else 0, loading)) is not None:
            return look, why
    return most, None


@pytest.mark.parametrize(
    ("shown", "given_up"),
    [
        ({}, LOOKS),
        ({"busy": True}, LONG),
        ({"loading": True}, LONG),
        ({"heard": True}, None),
        ({"heard": True, "busy": True}, None),
        ({"busy": True, "loading": True}, None),
    ],
)
def test_what_shows_life_and_for_how_long(shown: dict[str, Any], given_up: int | None) -> None:
    look, why = looks(3 * LONG, **shown)
    assert (look if why is not None else None) == given_up


def test_the_reason_says_what_was_missed_and_for_how_long() -> None:
    assert looks(LONG)[1] == "the engine process hung (no sign of life for 30 s)"
    assert looks(LONG, busy=True)[1] == "the engine process hung (busy, but no answer for 600 s)"


@pytest.mark.parametrize("loading", [False, True])
def test_one_that_was_stopped_is_not_waited_for(loading: bool) -> None:
    """Unless it goes on at once, or a debugger has stopped it."""
    watchdog = Watchdog(30.0)
    assert STOPPED * watchdog.interval <= 2.0
    for _ in range(3):
        assert [watchdog.look(True, 0, loading, stopped=True) for _ in range(STOPPED - 1)] == [None] * (STOPPED - 1)
        assert watchdog.look(True, 0, loading) is None
    *_, why = (watchdog.look(False, 0, loading, stopped=True) for _ in range(STOPPED))
    assert why == "the engine process hung (it was stopped by a signal 2 s ago)"


def test_any_sign_of_life_starts_the_count_again() -> None:
    watchdog = Watchdog(float(LOOKS))
    for ticks in range(1, 4):
        for _ in range(LOOKS - 1):
            assert watchdog.look(False, ticks, False) is None
    assert watchdog.look(True, 3, False) is None
    for _ in range(LOOKS - 1):
        assert watchdog.look(False, 3, False) is None
    assert watchdog.look(False, 3, False) is not None
