"""``foresay serve``: the HTTP server, with the engine in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import resource
from argparse import Namespace

from server.cli.command import Command
from server.cli.progress import Stages
from server.host.imports import uncollected
from server.host.spare import Spares
from server.settings.config import ServeConfig


def run(config: ServeConfig, arguments: Namespace) -> int:
    """Serve until told to stop."""
    allow_most_files()
    # Several models come when they are asked for; one alone is wanted at once, and the server has much to import.
    alone = not config.models and not config.replicas
    with Stages(lines=True) as stages, Spares(ahead=alone) as spawning:
        with uncollected():
            from server.cli.serving import serve
        gc.freeze()
        return serve(config, stages, spawning)


def allow_most_files() -> None:
    """Raise the soft limit of open files to the hard one: every connection is one, and shells begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it; then it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
