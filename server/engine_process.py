"""The engine process: reads frames between steps, steps, sends what the step emitted.

Started by :mod:`server.engine_client` as ``python -P -m server.engine_process FD SERVER``, the server's process id. It
ends when told to, when the server dies, when the other end of its socket closes, or when a step raises (the server then
starts a fresh one).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from server import frames
from server.config import EngineConfig
from server.grammars.compiler import GrammarCompiler
from server.grammars.pending import Pending
from spec.engine import Engine
from spec.errors import ConfigurationError, ForesayError, InvalidRequest
from spec.protocols import Constraint
from spec.request import Delta, EngineInfo, Request

if TYPE_CHECKING:  # the models come after the first frame
    from drafters.shadow import Shadow
    from server.watchers import Watchers

READ_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1
#: What reading or writing raises when the server is not there any more.
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
log = logging.getLogger("foresay.engine")


class Link:
    """The engine's end of the socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = frames.FrameSplitter()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._poll = select.poll()  # select() knows no descriptor above 1023, and the server may have more
        for readable in (connection, self._alarm):
            self._poll.register(readable, select.POLLIN)

    def close(self) -> None:
        """Give back what it opened; the connection is the caller's."""
        self._alarm.close()
        self._bell.close()

    def send(self, frame: frames.DownFrame) -> None:
        """Send one frame; waits if the server is behind with reading."""
        self._connection.sendall(frames.pack(frame))

    def loading(self, phase: str, share: float | None = None) -> None:
        """Tell the server what is being loaded, and how much of it is there (0 to 1)."""
        self.send(frames.Loading(phase, share))

    def wake(self) -> None:
        """End a :meth:`receive` that waits; may be called in another thread."""
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._bell.send(b"!")

    def receive(self, wait: bool) -> Iterator[frames.UpFrame | frames.Rejected]:
        """The frames that have arrived; with ``wait``, blocks until there are bytes or :meth:`wake` was called.

        EOFError if the server is gone.
        """
        if wait:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._alarm.fileno() in ready:
                self._alarm.recv(READ_BYTES)
        data = self._read()
        for body in self._splitter.feed(data):
            yield frames.unpack_up(body)

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError
        return data


class Loop:
    """Feeds one engine from one link. compiler: makes constraints of grammars; None if the model has none. shadow: an
    observer of the engine whose reports the server gets."""

    def __init__(
        self, engine: Engine, link: Link, compiler: GrammarCompiler | None = None, shadow: Shadow | None = None
    ) -> None:
        self._engine = engine
        self._shadow = shadow
        self._link = link
        self._pending = Pending(compiler, link.wake)
        self._stopped = False

    def run(self) -> None:
        """Step while there is work, sleep in the socket while there is none, until stopped."""
        while not self._stopped:
            for frame in self._link.receive(wait=not self._engine.has_work):
                self._apply(frame)
            for request, compiled in self._pending.ready():
                self._add(request, compiled)
            if self._engine.has_work and not self._stopped:
                deltas = self._engine.step()
                if deltas or self._engine.trace is not None:
                    self._link.send(frames.Deltas(deltas, self._engine.trace))
            self._observe()

    def _observe(self) -> None:
        """Nobody waits for tokens now: note what happened, and what a shadow would have had accepted."""
        self._engine.tell()
        if self._shadow is not None:
            for report in self._shadow.reports():
                self._link.send(frames.Shadowed(report))

    def _apply(self, frame: frames.UpFrame | frames.Rejected) -> None:
        match frame:
            case frames.Rejected():
                log.error("a frame could not be read: %s", frame.message)
                self._link.send(frame)
            case frames.Add(request) if request.grammar is not None:
                self._pending.begin(request)
            case frames.Add(request):
                self._add(request)
            case frames.Cancel(id):
                if not self._pending.cancel(id):
                    self._engine.cancel(id)
            case frames.Finish(id, at_token):
                self._engine.finish(id, at_token)
            case frames.KeepWarm(tokens, salt):
                self._engine.keep_warm(tokens, salt)
            case frames.Inspect():
                self._link.send(self._inspected())
            case frames.Ping():
                self._link.send(frames.Pong())
            case frames.Stop():
                self._stopped = True

    def _add(self, request: Request, constraint: Constraint | InvalidRequest | None = None) -> None:
        """Begin a request; constraint: its grammar, compiled, or why that cannot be."""
        try:
            if isinstance(constraint, InvalidRequest):
                raise constraint
            self._engine.add(request, constraint)
        except InvalidRequest as error:
            self._link.send(frames.Rejected(request.id, error.param, error.message, error.code))
        except Exception as error:  # the others need not know
            log.exception("request %s could not begin", request.id)
            with contextlib.suppress(Exception):
                self._engine.cancel(request.id)
            message = f"the request could not begin ({type(error).__name__}: {error})"
            self._link.send(frames.Deltas([Delta(id=request.id, tokens=[], finish_reason="error", error=message)]))

    def _inspected(self) -> frames.Inspected:
        problem = None
        try:
            self._engine.check()
        except AssertionError as error:
            problem = str(error) or "the page ledger does not add up"
        return frames.Inspected(problem, self._engine.has_work or len(self._pending) > 0)


def started(link: Link) -> frames.Start:
    """The first frame."""
    while True:
        for frame in link.receive(wait=True):
            assert isinstance(frame, frames.Start), "the first frame says which engine to build"
            return frame


def built(start: frames.Start, link: Link) -> tuple[Engine, Watchers] | None:
    """The engine and who watches it, or None after telling the server why there is none. The link is told what is being
    loaded."""
    from server.build import build_engine
    from server.memory import NoRoom
    from server.watchers import Watchers

    watchers = Watchers()

    def say(phase: str) -> None:
        link.send(frames.Loading(phase))

    try:
        watchers = Watchers.of(start.config)
        return build_engine(start.config, link.loading, watchers.observers, start.beside), watchers
    except NoRoom as error:
        link.send(frames.Failed(str(error), building=True, footprint=error.footprint))
    except ForesayError as error:
        link.send(frames.Failed(str(error), building=True, usage=isinstance(error, ConfigurationError)))
    except GONE:
        raise
    except Exception as error:
        log.exception("the engine could not be built")
        link.send(frames.Failed(f"{type(error).__name__}: {error}", building=True))
    watchers.close()
    return None


def grammar_compiler(config: EngineConfig, info: EngineInfo) -> GrammarCompiler | None:
    """What compiles grammars for the target; None, and a line in the log, if its tokenizer is of no use for that."""
    from server.resolved import target_directory

    try:
        return GrammarCompiler.load(target_directory(config), info.vocab_size, info.eos_token_ids)
    except Exception as error:  # llguidance knows fewer kinds of tokenizers than the tokenizers library
        log.warning("structured output is not available: %s", error)
        return None


def serve(link: Link) -> int:
    """Build the engine the first frame asks for, say so, and run it; returns the exit status."""
    start = started(link)
    parts = built(start, link)
    if parts is None:
        return 2
    engine, watchers = parts
    watchers.started(engine)
    link.loading("preparing grammars")
    compiler = grammar_compiler(start.config, engine.info)
    gc.freeze()  # what was loaded stays; a full collection would otherwise look through all of it in mid-stream
    link.send(frames.Ready(engine.info))
    try:
        Loop(engine, link, compiler, watchers.shadow).run()
    except GONE:
        raise
    except Exception as error:
        log.exception("a step failed")
        link.send(frames.Failed(f"the engine process failed ({type(error).__name__}: {error})"))
        return 1
    finally:
        watchers.close()
    return 0


def die_with(server: int) -> bool:
    """Be killed when the thread that started this process ends, even if this one is stopped; False: it is over already.

    server: its process id.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("prctl: %s; if the server is killed, an engine that hangs stays", os.strerror(ctypes.get_errno()))
    return os.getppid() == server


def main(descriptor: int, server: int) -> int:
    """Run until the server is done with it; the exit status is 0 for an orderly end."""
    if not die_with(server):
        return 0
    # A service manager's SIGTERM reaches every process; the server drains first and then ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection, contextlib.closing(Link(connection)) as link:
        try:
            return serve(link)
        except GONE:
            return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
