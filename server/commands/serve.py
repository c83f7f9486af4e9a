"""``foresay serve``: the HTTP server, with the engine in a process of its own."""

from __future__ import annotations

from argparse import Namespace

from server.commands.command import Command
from server.config import ServeConfig


def run(config: ServeConfig, arguments: Namespace) -> int:
    """Serve until told to stop."""
    from server.app import serve

    return serve(config)


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
