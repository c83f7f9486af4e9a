"""The engine process started, frozen, killed and left behind: real processes and real signals."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from foresay.server.cli import serving
from foresay.server.cli.main import main
from foresay.server.engine.generation import EngineStatus, Mailbox, generate
from foresay.server.engine_process import child
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
