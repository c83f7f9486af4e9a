"""Spare engine processes: who becomes the next engine, and that nobody is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foresay.server.host import spare
from foresay.server.host.child import state_of
from foresay.server.host.spare import SPARE, Spares
from tests.server.live import LiveServer, status_of

SECONDS = 180.0


def until(true: Callable[[], object]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def over(processes: list[int]) -> bool:
    """Whether all have ended; whoever adopted them may not have buried them yet."""
    return all(state_of(process) in "ZX" for process in processes)


def spare_of(server: LiveServer) -> int | None:
    """The process that waits."""
    return next((process for process, name in server.processes().items() if name == SPARE.decode()), None)


def next_engine(server: LiveServer) -> int:
    """The engine that comes after the one that is killed here; it answers."""
    [engine] = server.engine_processes()
    os.kill(engine, signal.SIGKILL)
    until(lambda: server.engine_processes() not in ([engine], []))
    url = server.wait_for_url()
    until(lambda: asyncio.run(status_of(url, "/ready")) == 200)
    [engine] = server.engine_processes()
    return engine


@pytest.mark.slow
def test_a_spare_is_the_next_engine_unless_something_happened_to_it(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "log", "--draft", "none") as server:
        server.wait_for_url()
        for _ in range(2):  # one of a program, one of a fork
            until(lambda: spare_of(server))
            waiting = spare_of(server)
            assert next_engine(server) == waiting
        for number in (signal.SIGKILL, signal.SIGSTOP):
            until(lambda: spare_of(server))
            waiting = spare_of(server)
            assert waiting is not None
            os.kill(waiting, number)
            assert next_engine(server) != waiting
            assert waiting not in server.processes(), "it is buried"
        until(lambda: spare_of(server))
        left = list(server.processes())
        server.process.kill()
        until(lambda: over(left))


@pytest.mark.slow
def test_a_server_that_ends_takes_its_spare_along(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "log", "--draft", "none") as server:
        server.wait_for_url()
        until(lambda: spare_of(server))
        left = list(server.processes())
        server.terminate()
        assert server.process.wait(SECONDS) == 0
        until(lambda: over(left))


def test_what_must_not_be_forked_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00 r-xp /usr/lib/x86_64-linux-gnu/libcuda.so.1"
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])
    assert spare._can_be_forked()
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert not spare._can_be_forked()
    monkeypatch.undo()
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    assert not spare._can_be_forked()
    done.set()


def test_where_orphans_are_not_adopted_each_is_started_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(spare, "prctl", lambda option, argument: False)
    monkeypatch.setattr(spare, "spawn", lambda *arguments: given.append(arguments))
    with Spares() as spawning:
        spawning()
    assert given == [()]
