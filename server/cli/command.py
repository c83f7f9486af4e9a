"""The description of a command for the command line."""

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


Run = Callable[[Any, Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``foresay``. Calling it runs it; made by :func:`command`."""

    name: str
    summary: str
    examples: tuple[str, ...]
    config: type[EngineConfig] | None
    run: Run
    add_arguments: Callable[[ArgumentParser], None]
    elsewhere: bool
    add_after_target: Callable[[ArgumentParser], None]
    passes_on: bool

    def __call__(self, config: Any, arguments: Namespace) -> int:
        """Run it with the loaded config (None without one) and the parsed arguments; returns the exit status."""
        return self.run(config, arguments)


def command(
    config: type[EngineConfig] | None,
    add_arguments: Callable[[ArgumentParser], None] = _no_arguments,
    name: str = "",
    elsewhere: bool = False,
    add_after_target: Callable[[ArgumentParser], None] = _no_arguments,
    passes_on: bool = False,
) -> Callable[[Run], Command]:
    """The command of a function, called ``name`` if not as the function; its docstring has the summary, as a sentence,
    and examples.

    config: the struct whose fields become flags; None for a command without an engine. add_arguments: declares
    arguments that are not settings. elsewhere: the target is another process's, which may see other files.
    add_after_target: declares positional arguments after TARGET. passes_on: words after ``--`` are for another program:
    ``words`` of the arguments.
    """

    def made(run: Run) -> Command:
        first, *rest = (run.__doc__ or "").splitlines()
        examples = tuple(line.strip() for line in rest if line.strip())
        summary = first[0].lower() + first[1:].rstrip(".")
        given = name or run.__name__, summary, examples, config, run
        return Command(*given, add_arguments, elsewhere, add_after_target, passes_on)

    return made


def report_error(name: str, error: BaseException) -> int:
    """Print what went wrong; returns the exit status: 2 for wrong settings, 1 otherwise."""
    print(f"foresay {name}: {error}", file=sys.stderr)
    return USAGE_ERROR if isinstance(error, ConfigurationError) else 1


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """The server's base URL for clients; a wildcard address becomes localhost."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    literal = f"[{reachable}]" if ":" in reachable and not reachable.startswith("[") else reachable
    return f"{scheme}://{literal}:{port}"
