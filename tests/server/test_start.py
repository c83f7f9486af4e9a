"""Processes until an engine is ready and after it: what is imported and started when, which is the next engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foresay.server.cli.main import main
from foresay.server.engine_process import child
from foresay.server.engine_process.child import ahead, state_of
from foresay.verifier.ops.kernels.cpu.compiler import NAME


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


def children() -> set[str]:
    """Ids of the processes that this thread has started and that are there, dead or alive."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_engine_process_is_started_before_anything_large_is_imported() -> None:
    code = (
        "import sys; from foresay.server.engine_process import child\n"
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
        "import sys; from foresay.server.engine_process.process import _import; _import()\n"
        "assert {'torch', 'foresay.server.engine.build', 'foresay.server.engine_process.loop'} <= sys.modules.keys(), "
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
    with ahead(True) as spawn:
        assert next(made) == "second", "the first one is there already"
        assert [str(spawn()), str(spawn())] == ["first", "third"]


def test_where_none_can_be_started_it_is_tried_again_when_one_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(child, "spawn", refused)
    with ahead(True) as spawn, pytest.raises(OSError, match="too many"):
        spawn()


SECONDS = 180.0


def until(true: Callable[[], object]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


COMPILES = """
import os, time
from foresay.verifier.ops.kernels.cpu import compiler
from foresay.verifier.ops.kernels.cpu.jit import Processor
Processor.here().compiled("define void @f() {\\n ret void\\n}")
print(compiler.compiled._child._process.pid, flush=True)
time.sleep(600)
"""


def test_of_an_engine_that_is_killed_no_compiler_stays() -> None:
    with subprocess.Popen([sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        compiler = Path(f"/proc/{int(engine.stdout.readline())}")
        assert compiler.joinpath("comm").read_text().strip() == NAME
        engine.kill()
        until(lambda: state_of(int(compiler.name)) in "ZX")
