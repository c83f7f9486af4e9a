"""Processes until an engine is ready and after it: what is imported and started when, which is the next engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foresay.server.cli.main import main
from foresay.server.host import child
from foresay.server.host.child import SPARE, Spares, state_of
from tests.server.live import LiveServer, status_of


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


def children() -> set[str]:
    """Ids of the processes that this thread has started and that are there, dead or alive."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_engine_process_is_started_before_anything_large_is_imported() -> None:
    code = (
        "import sys; from foresay.server.host import child\n"
        "def spawn(*given):\n"
        "    print(*sys.modules.keys() & {'aiohttp', 'asyncio', 'numpy', 'torch', 'transformers'}, len(sys.modules))\n"
        "    raise SystemExit\n"
        "child.spawn = spawn\n"
        "from foresay.server.cli.main import main; main(['serve'])"
    )
    *large, count = printed(code).split()
    assert not large and int(count) < 400


def test_an_engine_imports_no_compiler_of_torchs_and_no_text() -> None:
    code = (
        "import sys; from foresay.server.host.process import _import; _import()\n"
        "assert {'torch', 'foresay.server.engine.build', 'foresay.server.host.loop'} <= sys.modules.keys(), "
        "'before the first frame'\n"
        "from foresay.server.engine.build import build_engine\n"
        "from foresay.server.settings.config import ServeConfig\n"
        "build_engine(ServeConfig())\n"
        "print(*sys.modules.keys() & {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'aiohttp'})"
    )
    assert printed(code).split() == []


def test_a_command_with_an_engine_of_its_own_imports_none_either() -> None:
    """Where transformers finds torch it imports the compiler, and more, with a tokenizer."""
    code = (
        "import sys; from foresay.server.cli.main import main\n"
        "assert main(['generate', '--prompt', 'Once', '--max-tokens', '2', '--json']) == 0\n"
        "print(*sys.modules.keys() & {'torch._dynamo', 'sympy', 'torch.distributed.tensor', 'aiohttp'})"
    )
    assert printed(code).splitlines()[1:] in ([], [""])


def test_a_process_that_nobody_requested_is_ended(capsys) -> None:
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err and children() <= before


def test_the_first_request_has_the_process_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Iterator[Any] = iter(("first", "second", "third"))
    monkeypatch.setattr(child, "spawn", lambda *given: next(made))
    with Spares(ahead=True) as spawn:
        assert next(made) == "second", "the first one is there already"
        assert [str(spawn()), str(spawn())] == ["first", "third"]


def test_where_none_can_be_started_it_is_tried_again_when_one_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(child, "spawn", refused)
    with Spares(ahead=True) as spawn, pytest.raises(OSError, match="too many"):
        spawn()


SECONDS = 180.0


def until(true: Callable[[], object]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def over(processes: list[int]) -> bool:
    """Whether all have ended; the process that adopted them may not have reaped them yet."""
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
        os.kill(server.engine_processes()[0], signal.SIGSTOP)
        server.process.kill()
        until(lambda: over(left))


def test_what_must_not_be_forked_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00 r-xp /usr/lib/x86_64-linux-gnu/libcuda.so.1"
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])
    assert child._can_be_forked()
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert not child._can_be_forked()
    monkeypatch.undo()
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    assert not child._can_be_forked()
    done.set()


def test_where_orphans_are_not_adopted_each_is_started_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(child, "prctl", lambda option, argument: False)
    monkeypatch.setattr(child, "spawn", lambda *arguments: given.append(arguments))
    with Spares() as spawning:
        spawning()
    assert given == [()]


COMPILES = """
import os, time
from foresay.verifier.ops.kernels.cpu import compiler
from foresay.verifier.ops.kernels.cpu.jit import Processor
Processor.here().compiled("define void @f() {\\n ret void\\n}")
print(compiler.compiled._child._process.pid, flush=True)
time.sleep(600)
"""


def test_of_an_engine_that_is_killed_no_compiler_stays() -> None:
    """The server adopts it."""
    with Spares(), subprocess.Popen([sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        compiler = Path(f"/proc/{int(engine.stdout.readline())}")
        assert compiler.joinpath("comm").read_text().strip() == child.COMPILER.decode()
        engine.kill()
        until(lambda: not compiler.exists())
