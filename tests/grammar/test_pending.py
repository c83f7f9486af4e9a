"""Compiling in the engine process: next to the steps, in order, and for no request that was cancelled."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest

from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import Link
from foresay.server.engine_process.loop import Loop
from foresay.server.text.grammars.compiler import GrammarCompiler, Pending
from foresay.server.text.grammars.constraint import LlguidanceConstraint
from foresay.spec.constrain import Constraint
from foresay.spec.engine import EngineCore
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, Grammar, Request
from foresay.spec.sampling import SamplingParams
from tests.grammar.oracle import compiler

#: Seconds after which something hangs: a busy machine takes many for anything.
PATIENCE = 300.0


class Held(GrammarCompiler):
    """The bundled pair's compiler, which waits before each grammar until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def compile(self, grammar: Grammar, salt: str = "") -> LlguidanceConstraint:
        self.begun.release()
        assert self.go.acquire(timeout=PATIENCE)
        return compiler().compile(grammar, salt)


class Stepping:
    """An engine that takes requests and emits a token of each running one per step."""

    def __init__(self) -> None:
        self.running: dict[str, Constraint | None] = {}
        self.cancelled: list[str] = []
        self.trace = None

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        self.running[request.id] = constraint

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        self.running.pop(id, None)

    def step(self) -> list[Delta]:
        return [Delta(id=id, tokens=[5]) for id in self.running]

    def keep_one(self) -> bool:
        return False

    prepare_one = keep_one

    def notify(self) -> None:
        """Nobody observes it."""

    def check(self) -> None:
        return


def request(id: str, grammar: str | None = None) -> Request:
    made = None if grammar is None else Grammar(text=grammar, param="the.field")
    return Request(id=id, prompt=[5], params=SamplingParams(), grammar=made)


class Server:
    """The other end of the engine process's link."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection = connection
        self._splitter = frames.FrameSplitter()
        self._frames: list[frames.DownFrame] = []

    def send(self, frame: frames.UpFrame) -> None:
        self._connection.sendall(frames.pack(frame))

    def next(self) -> frames.DownFrame:
        while not self._frames:
            self._read()
        return self._frames.pop(0)

    def _read(self) -> None:
        self._frames += [frames.unpack_down(body) for body in self._splitter.feed(self._connection.recv(1 << 16))]

    def read_until(self, happened: threading.Semaphore) -> None:
        """Take what the engine sends (it waits for its reader) until this has happened."""
        self._connection.settimeout(0.01)
        end = time.monotonic() + PATIENCE
        while not happened.acquire(timeout=0.01):
            assert time.monotonic() < end
            with contextlib.suppress(TimeoutError):
                self._read()
        self._connection.settimeout(PATIENCE)

    def read_while(self, thread: threading.Thread) -> None:
        """Take what the engine still sends (it waits for its reader) until it has ended."""
        self._connection.settimeout(0.05)
        end = time.monotonic() + PATIENCE
        while thread.is_alive():
            assert time.monotonic() < end
            with contextlib.suppress(TimeoutError):
                self._connection.recv(1 << 20)
            thread.join(0.01)

    def until_running(self, id: str) -> None:
        """Read on until ``id`` has emitted something."""
        while True:
            frame = self.next()
            if isinstance(frame, frames.Deltas) and id in [delta.id for delta in frame.deltas]:
                return


@pytest.fixture
def running() -> Iterator[tuple[Server, Stepping, Held]]:
    ours, theirs = socket.socketpair()
    server, engine, held = Server(ours), Stepping(), Held()
    with ours, theirs, contextlib.closing(Link(theirs)) as link:
        loop = Loop(cast(EngineCore, engine), link, lambda: held)
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield server, engine, held
        server.send(frames.Stop())
        held.go.release(9)
        server.read_while(thread)


def test_others_step_on_while_a_grammar_is_compiled(running: tuple[Server, Stepping, Held]):
    server, engine, held = running
    server.send(frames.Add(request("slow", "start: /a+/")))
    server.read_until(held.begun)
    server.send(frames.Add(request("other")))
    server.until_running("other")
    assert list(engine.running) == ["other"]
    held.go.release()
    server.until_running("slow")
    assert isinstance(engine.running["slow"], LlguidanceConstraint)


def test_an_idle_engine_wakes_when_the_grammar_is_ready(running: tuple[Server, Stepping, Held]):
    server, _, held = running
    for id in ("first", "second"):
        server.send(frames.Add(request(id, "start: /a+/")))
        server.read_until(held.begun)
        held.go.release()
        server.until_running(id)
        server.send(frames.Cancel(id))


def test_who_leaves_while_the_grammar_is_compiled_never_runs(running: tuple[Server, Stepping, Held]):
    server, engine, held = running
    server.send(frames.Add(request("gone", "start: /a+/")))
    server.send(frames.Add(request("next", "start: /b+/")))
    server.read_until(held.begun)
    server.send(frames.Ping())
    assert isinstance(server.next(), frames.Pong)
    server.send(frames.Cancel("gone"))
    held.go.release(2)
    server.until_running("next")
    assert list(engine.running) == ["next"]


def test_what_does_not_compile_is_rejected_by_its_field(running: tuple[Server, Stepping, Held]):
    server, _, held = running
    held.go.release()
    server.send(frames.Add(request("bad", "start: foo")))
    rejected = server.next()
    assert isinstance(rejected, frames.Rejected)
    assert (rejected.id, rejected.error.param) == ("bad", "the.field")
    assert "unknown name" in rejected.error.message


def test_a_model_without_a_compiler_says_so():
    done = threading.Event()
    pending = Pending(lambda: None, done.set)
    pending.begin(request("one", "start: /a+/"))
    assert done.wait(PATIENCE)
    ((_, error),) = pending.ready()
    assert isinstance(error, InvalidRequest) and "no tokenizer.json" in error.message
    assert len(pending) == 0


def test_whether_a_grammar_was_compiled_before_shows_only_within_a_salt():
    """Else the time to the first token would show one key which schemas the others use."""
    salted = msgspec.structs.replace(request("one", "start: /[0-7]+z/"), salt="alice:")
    assert salted.grammar is not None
    done = threading.Event()
    pending = Pending(compiler, done.set)
    pending.begin(salted)
    assert done.wait(PATIENCE)
    assert [type(constraint) for _, constraint in pending.ready()] == [LlguidanceConstraint]
    known = {salt: compiler().kept(salted.grammar, salt) is not None for salt in ("alice:", "bob:", "alice:own", "")}
    assert known == {"alice:": True, "bob:": False, "alice:own": False, "": False}
