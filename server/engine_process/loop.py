"""The engine process once it has imported this: it builds its engine, then reads frames, steps, and sends what the
step emitted."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic

from foresay.server.engine.build import build_engine
from foresay.server.engine.memory import NoRoom
from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import GONE, Link
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.grammars.compiler import GrammarCompiler, Pending
from foresay.spec.constrain import Constraint
from foresay.spec.engine import EngineCore
from foresay.spec.errors import ConfigurationError, ForesayError, InvalidRequest
from foresay.spec.request import Delta, EngineInfo, Request
from foresay.verifier.model.weight_cache import cancel_saves
from foresay.verifier.ops.kernels.cpu import threads

log = logging.getLogger("foresay.engine")

#: How long a stopping engine goes on writing pages to disk: it is killed after 5.
_LAST_SECONDS = 4.0


class Loop:
    """Feeds one engine from one link. grammars: loads the grammar compiler, None if the model has none."""

    def __init__(
        self,
        engine: EngineCore,
        link: Link,
        grammars: Callable[[], GrammarCompiler | None] = lambda: None,
    ) -> None:
        self._engine, self._link = engine, link
        self._pending = Pending(grammars, link.wake)
        self._stopped = self._idle = False

    def run(self) -> None:
        """Step while there is work, prepare for more of it and keep pages on disk while there is none, and sleep in the
        socket after that, until stopped."""
        self._go_round()
        until = monotonic() + _LAST_SECONDS
        while self._engine.keep_one() and monotonic() < until:
            pass

    def _go_round(self) -> None:
        while not self._stopped:
            for frame in self._link.receive(wait=not (self._engine.has_work or self._idle)):
                self._apply(frame)
            for request, compiled in self._pending.ready():
                self._add(request, compiled)
            if self._engine.has_work and not self._stopped:
                deltas = self._engine.step()
                if deltas or self._engine.trace is not None:
                    self._link.send(frames.Deltas(deltas, self._engine.trace))
            self._engine.notify()  # once the tokens are sent
            self._idle = not self._engine.has_work and (self._engine.prepare_one() or self._engine.keep_one())

    def _apply(self, frame: frames.UpFrame | frames.Rejected) -> None:
        match frame:
            case frames.Rejected():
                log.error("a frame could not be read: %s", frame.error)
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
            case frames.Ping():
                self._link.send(frames.Pong())
            case frames.Stop():
                self._stopped = True

    def _add(self, request: Request, constraint: Constraint | InvalidRequest | None = None) -> None:
        """Start a request. constraint: its compiled grammar, or why it cannot be compiled."""
        try:
            if isinstance(constraint, InvalidRequest):
                raise constraint
            self._engine.add(request, constraint)
        except InvalidRequest as error:
            self._link.send(frames.Rejected(request.id, error.fault, error.code))
        except Exception as error:  # must not affect other requests
            log.exception("request %s could not begin", request.id)
            with contextlib.suppress(Exception):
                self._engine.cancel(request.id)
            message = f"the request could not begin ({type(error).__name__}: {error})"
            self._link.send(frames.Deltas([Delta(id=request.id, tokens=[], finish_reason="error", error=message)]))


# -- from the first frame to the exit status ---------------------------------------------------------------------------


def started(link: Link) -> frames.Start:
    """Wait for the first frame."""
    while True:
        for frame in link.receive(wait=True):
            assert isinstance(frame, frames.Start), "the first frame says which engine to build"
            return frame


def built(start: frames.Start, link: Link) -> EngineCore | None:
    """The engine, or None after reporting to the server why it cannot be built. Progress goes to the link."""
    try:
        return build_engine(start.config, link.loading, start.reserved, start.costs, True, True)
    except NoRoom as error:
        link.send(frames.Failed(str(error), building=True, footprint=error.footprint))
    except ForesayError as error:
        link.send(frames.Failed(str(error), building=True, usage=isinstance(error, ConfigurationError)))
    except GONE:
        raise
    except Exception as error:
        log.exception("the engine could not be built")
        link.send(frames.Failed(f"{type(error).__name__}: {error}", building=True))
    return None


def grammar_compiler(config: EngineConfig, info: EngineInfo) -> GrammarCompiler | None:
    """The grammar compiler for the target; None, and a line in the log, if its tokenizer is not supported."""
    try:
        return GrammarCompiler.load(target_directory(config), info.vocab_size, info.eos_token_ids)
    except Exception as error:  # llguidance supports fewer kinds of tokenizers than the tokenizers library
        log.warning("structured output is not available: %s", error)
        return None


def serve(link: Link) -> int:
    """Build the engine that the first frame requests, report that it is ready, and run it; returns the exit status."""
    start = started(link)
    threads.pin()
    engine = built(start, link)
    if engine is None:
        return 2
    engine.steps = start.steps
    gc.freeze()  # what was loaded stays; a full collection would traverse all of it in mid-stream
    link.send(frames.Ready(engine.info, start.costs))
    try:
        grammars = partial(grammar_compiler, start.config, engine.info)
        Loop(engine, link, grammars).run()
    except GONE:
        raise
    except Exception as error:
        log.exception("a step failed")
        running = [sequence.id for sequence in engine.scheduler.running]
        link.send(frames.Failed(f"the engine process failed ({type(error).__name__}: {error})", running=running))
        return 1
    finally:
        cancel_saves()
    return 0
