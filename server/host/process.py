"""The engine process: reads frames between steps, steps, sends what the step emitted.

Started by :mod:`foresay.server.host.child` as ``python -P -m foresay.server.host.process SERVER CONTROL FD``: the
server's process id, and descriptors. Over CONTROL it offers a spare, unless it is -1
(:mod:`foresay.server.host.child`). It imports the engine's modules before the first frame says which engine to build.
It ends on a Stop frame, when the server dies, when the other end of its socket closes, or when a step raises (the
server then starts a new one).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

from foresay.server.host import frames
from foresay.server.host.child import ENGINE, PR_SET_NAME, die_with, leave_spare, prctl
from foresay.server.host.frames import GONE, Link
from foresay.server.host.imports import uncollected
from foresay.server.settings.config import EngineConfig
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import EngineInfo

if TYPE_CHECKING:  # these import torch: see _import
    from foresay.server.engine.observers import EngineObservers
    from foresay.server.engine.witness import Witness
    from foresay.server.text.grammars.compiler import GrammarCompiler
    from foresay.spec.engine import Engine

log = logging.getLogger("foresay.engine")


def _import() -> None:
    """Import the engine's modules."""
    with uncollected():
        from foresay.verifier.ops.kernels.cpu import kept

        kept.sources()  # before modules are read: an upgrade may replace the files later
        import foresay.server.engine.build
        import foresay.server.engine.observers
        import foresay.server.host.loop  # noqa: F401
        from foresay.verifier.ops.kernels.cpu.launch import Compiled

    Compiled.by_source = True
    gc.freeze()


def started(link: Link) -> frames.Start:
    """Wait for the first frame."""
    while True:
        for frame in link.receive(wait=True):
            assert isinstance(frame, frames.Start), "the first frame says which engine to build"
            return frame


def built(start: frames.Start, link: Link, witness: Witness) -> tuple[Engine, EngineObservers] | None:
    """The engine and its observers, or None after reporting to the server why it cannot be built. Progress goes to the
    link."""
    from foresay.server.engine.build import build_engine
    from foresay.server.engine.memory import NoRoom
    from foresay.server.engine.observers import EngineObservers

    observers = EngineObservers()

    try:
        observers = EngineObservers.of(start.config)
        given = start.config, link.loading, observers.observers, start.reserved, start.costs, witness, True
        return build_engine(*given), observers
    except NoRoom as error:
        link.send(frames.Failed(str(error), building=True, footprint=error.footprint))
    except ForesayError as error:
        link.send(frames.Failed(str(error), building=True, usage=isinstance(error, ConfigurationError)))
    except GONE:
        raise
    except Exception as error:
        log.exception("the engine could not be built")
        link.send(frames.Failed(f"{type(error).__name__}: {error}", building=True))
    observers.close()
    return None


def grammar_compiler(config: EngineConfig, info: EngineInfo) -> GrammarCompiler | None:
    """The grammar compiler for the target; None, and a line in the log, if its tokenizer is not supported."""
    from foresay.server.settings.resolved import target_directory
    from foresay.server.text.grammars.compiler import GrammarCompiler

    try:
        return GrammarCompiler.load(target_directory(config), info.vocab_size, info.eos_token_ids)
    except Exception as error:  # llguidance supports fewer kinds of tokenizers than the tokenizers library
        log.warning("structured output is not available: %s", error)
        return None


def serve(link: Link) -> int:
    """Build the engine that the first frame requests, report that it is ready, and run it; returns the exit status."""
    from foresay.server.engine.witness import Witness
    from foresay.server.host.loop import Loop
    from foresay.verifier.model.kept_weights import leave_off
    from foresay.verifier.ops.kernels.cpu import threads

    start, witness, progress = started(link), Witness(), threads.share()
    threads.keep_apart()
    parts = built(start, link, witness)
    if parts is None:
        return 2
    engine, observers = parts
    engine.steps = start.steps
    observers.started(engine)
    gc.freeze()  # what was loaded stays; a full collection would traverse all of it in mid-stream
    link.send(frames.Ready(engine.info, start.costs, progress if engine.info.device == "cpu" else ""))
    try:
        grammars = partial(grammar_compiler, start.config, engine.info)
        Loop(engine, link, grammars, observers.shadow, witness).run()
    except GONE:
        raise
    except Exception as error:
        log.exception("a step failed")
        running = [sequence.id for sequence in engine.scheduler.running]
        link.send(frames.Failed(f"the engine process failed ({type(error).__name__}: {error})", running=running))
        return 1
    finally:
        observers.close()
        leave_off()
    return 0


def main(server: int, control: int, descriptor: int) -> int:
    """Run until the server stops it; returns the exit status, 0 for an orderly end."""
    if not die_with(server):
        return 0
    # A service manager's SIGTERM reaches every process; the server drains first and then ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prctl(PR_SET_NAME, ENGINE)
    _import()
    if control >= 0:
        descriptor = leave_spare(socket.socket(fileno=control), server, descriptor)
    with socket.socket(fileno=descriptor) as connection, contextlib.closing(Link(connection)) as link:
        try:
            return serve(link)
        except GONE:
            return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
