"""On the path of the soak's servers: SIGUSR1 makes the next step of an engine process raise."""

from __future__ import annotations

import signal
import sys

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.spec.engine import EngineCore
    from foresay.spec.request import Delta

    step = EngineCore.step
    asked: list[int] = []

    def failing(engine: EngineCore) -> list[Delta]:
        """A step, or the failure that was requested."""
        if asked:
            raise RuntimeError("a step was made to fail")
        return step(engine)

    EngineCore.step = failing  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
