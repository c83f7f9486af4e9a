"""What the command line needs to know of a command."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foresay.server.settings.config import EngineConfig
from foresay.spec.errors import ConfigurationError

USAGE_ERROR = 2


def _no_arguments(parser: ArgumentParser) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``foresay``.

    config: whose fields become flags; None for a command that needs no engine. run: called with the loaded config (None
    without one) and the parsed arguments, returns the exit status. add_arguments: declares what is no setting.
    elsewhere: the target is one of another process, which may see other files. add_after_target: declares what is given
    without a flag, after TARGET. passes_on: what follows a ``--`` is for another program: ``words`` of the arguments.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    config: type[EngineConfig] | None
    run: Callable[[Any, Namespace], int]
    add_arguments: Callable[[ArgumentParser], None] = _no_arguments
    elsewhere: bool = False
    add_after_target: Callable[[ArgumentParser], None] = _no_arguments
    passes_on: bool = False


def told(name: str, error: BaseException) -> int:
    """Tell the user of the command what went wrong; returns the exit status: 2 for wrong settings, 1 for the rest."""
    print(f"foresay {name}: {error}", file=sys.stderr)
    return USAGE_ERROR if isinstance(error, ConfigurationError) else 1


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Where clients reach the server; a wildcard address is reached as localhost."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    literal = f"[{reachable}]" if ":" in reachable and not reachable.startswith("[") else reachable
    return f"{scheme}://{literal}:{port}"
