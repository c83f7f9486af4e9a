"""``foresay serve``: the HTTP server, with the engine in a process of its own."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext

from server import files
from server.child import Ahead, spawn
from server.commands.command import Command
from server.config import ServeConfig
from server.uncollected import uncollected


def run(config: ServeConfig, arguments: Namespace) -> int:
    """Serve until told to stop."""
    files.allow_most()
    # Several models come when they are asked for; one alone is wanted at once, and importing all takes a while.
    with nullcontext(spawn) if config.models else Ahead() as spawning:
        with uncollected():
            from server.app import serve

        return serve(config, spawning)


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
