"""The engine process: reads frames between steps, steps, sends what the step emitted.

Started by :mod:`server.engine_client` as ``python -m server.engine_process FD``. It ends when told to, when the other
end of its socket closes, or when a step raises (the server then starts a fresh one).
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator

from server import frames
from server.config import EngineConfig
from spec.engine import Engine
from spec.errors import ForesayError, InvalidRequest

READ_BYTES = 1 << 18
#: What reading or writing raises when the server is not there any more.
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
log = logging.getLogger("foresay.engine")


class Link:
    """The engine's end of the socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = frames.FrameSplitter()

    def send(self, frame: frames.DownFrame) -> None:
        """Send one frame; waits if the server is behind with reading."""
        self._connection.sendall(frames.pack(frame))

    def receive(self, wait: bool) -> Iterator[frames.UpFrame]:
        """The frames that have arrived; with ``wait``, blocks until there are bytes. EOFError if the server is gone."""
        data = self._read(wait)
        for body in self._splitter.feed(data):
            yield frames.unpack_up(body)

    def _read(self, wait: bool) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError
        return data


class Loop:
    """Feeds one engine from one link."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._stopped = False

    def run(self) -> None:
        """Step while there is work, sleep in the socket while there is none, until stopped."""
        while not self._stopped:
            for frame in self._link.receive(wait=not self._engine.has_work):
                self._apply(frame)
            if self._engine.has_work and not self._stopped:
                deltas = self._engine.step()
                if deltas:
                    self._link.send(frames.Deltas(deltas))

    def _apply(self, frame: frames.UpFrame) -> None:
        match frame:
            case frames.Add(request):
                self._add(frame, request.id)
            case frames.Cancel(id):
                self._engine.cancel(id)
            case frames.Finish(id, at_token):
                self._engine.finish(id, at_token)
            case frames.Inspect():
                self._link.send(self._inspected())
            case frames.Stop():
                self._stopped = True

    def _add(self, frame: frames.Add, id: str) -> None:
        try:
            self._engine.add(frame.request)
        except InvalidRequest as error:
            self._link.send(frames.Rejected(id, error.param, error.message, error.code))

    def _inspected(self) -> frames.Inspected:
        problem = None
        try:
            self._engine.check()
        except AssertionError as error:
            problem = str(error) or "the page ledger does not add up"
        return frames.Inspected(problem, self._engine.has_work)


def started(link: Link) -> EngineConfig:
    """The config in the first frame."""
    while True:
        for frame in link.receive(wait=True):
            assert isinstance(frame, frames.Start), "the first frame says which engine to build"
            return frame.config


def built(config: EngineConfig, link: Link) -> Engine | None:
    """The engine, or None after telling the server why there is none. The link is told what is being loaded."""
    from server.build import build_engine

    try:
        return build_engine(config, lambda phase: link.send(frames.Loading(phase)))
    except ForesayError as error:
        link.send(frames.Failed(str(error), building=True))
    except GONE:
        raise
    except Exception as error:
        log.exception("the engine could not be built")
        link.send(frames.Failed(f"{type(error).__name__}: {error}", building=True))
    return None


def serve(link: Link) -> int:
    """Build the engine the first frame asks for, say so, and run it; returns the exit status."""
    engine = built(started(link), link)
    if engine is None:
        return 2
    gc.freeze()  # what was loaded stays; a full collection would otherwise look through all of it in mid-stream
    link.send(frames.Ready(engine.info))
    try:
        Loop(engine, link).run()
    except GONE:
        raise
    except Exception as error:
        log.exception("a step failed")
        link.send(frames.Failed(f"the engine process failed ({type(error).__name__}: {error})"))
        return 1
    return 0


def main(descriptor: int) -> int:
    """Run until the server is done with it; the exit status is 0 for an orderly end."""
    # A service manager's SIGTERM reaches every process; the server drains first and then ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        try:
            return serve(Link(connection))
        except GONE:
            return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
