"""``foresay serve`` from loaded settings to the exit status: what is printed meanwhile, and how the process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from server.cli import banner
from server.cli.command import told
from server.cli.progress import Stages
from server.engine.generation import EngineStatus
from server.host.child import Spawned, spawn
from server.http.life import BESIDE, CLOSING_SECONDS, run_server
from server.settings.config import ServeConfig
from server.settings.resolved import model_names
from spec.request import EngineInfo


def serve(config: ServeConfig, stages: Stages, spawn: Callable[[], Spawned] = spawn) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status. Raises what :func:`run_server` raises.

    stages: told of what goes on until the engine is ready. spawn: starts an engine process.
    """

    def ready(info: EngineInfo | None, port: int) -> None:
        stages.close()
        if info is None:
            banner.show_models(config, port)
        else:
            banner.show(info, config, model_names(config)[0], port, stages.summary())

    def changed(status: EngineStatus) -> None:
        if status.state == "loading":
            stages(status.message, status.share)

    try:
        with stages:
            return asyncio.run(run_server(config, ready, changed, spawn))
    finally:
        _leave_the_busy()


def _leave_the_busy() -> None:
    """End the process if a thread will not end, such as one that renders an endless template: Python waits for all."""
    deadline = time.monotonic() + CLOSING_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(BESIDE):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                error = sys.exception()
                status = 0 if error is None else told("serve", error)
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
