"""``foresay serve``: the HTTP server, with the engine in a process of its own."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from server.cli.command import Command
from server.cli.progress import Stages
from server.host.child import Ahead, Spawned, spawn
from server.host.imports import uncollected
from server.http import files
from server.settings.config import ServeConfig


def run(config: ServeConfig, arguments: Namespace) -> int:
    """Serve until told to stop."""
    files.allow_most()
    with Stages(lines=True) as stages, _spawning(config) as spawning:
        with uncollected():
            from server.cli.serving import serve
        gc.freeze()
        return serve(config, stages, spawning)


def _spawning(config: ServeConfig) -> AbstractContextManager[Callable[[], Spawned]]:
    """What starts engine processes. Several models come when they are asked for; one alone is wanted at once, and the
    server has much to import."""
    return nullcontext(spawn) if config.models or config.replicas else Ahead()


COMMAND = Command(
    "serve",
    "serve a model over HTTP, in the way of OpenAI's API",
    (
        "foresay serve",
        "foresay serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
        "foresay serve ./my-model --draft ngram --draft-tokens 6 --port 8001",
    ),
    ServeConfig,
    run,
)
