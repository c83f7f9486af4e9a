"""The description of a command for the command line: its name, its settings and other arguments, and what it runs."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foresay.server.settings.config import EngineConfig
from foresay.spec.errors import ConfigurationError

USAGE_ERROR = 2


Run = Callable[[Any, Namespace], int]
#: Declares arguments.
Add = Callable[[ArgumentParser], object]


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``foresay``. Calling it runs it; made by :func:`command`. before, after: declare the arguments
    that are not settings, before and after TARGET."""

    name: str
    summary: str
    examples: tuple[str, ...]
    config: type[EngineConfig] | None
    run: Run
    before: tuple[Add, ...]
    after: tuple[Add, ...]
    elsewhere: bool
    passes_on: bool

    def __call__(self, config: Any, arguments: Namespace) -> int:
        """Run it with the loaded config (None without one) and the parsed arguments; returns the exit status."""
        return self.run(config, arguments)


def argument(*names: str, after_target: bool = False, **options: Any) -> Callable[[Run], Run]:
    """Declares an argument of the command below it, as :meth:`ArgumentParser.add_argument` takes it."""
    return arguments(lambda parser: parser.add_argument(*names, **options), after_target)


def arguments(add: Add, after_target: bool = False) -> Callable[[Run], Run]:
    """As :func:`argument`, for several."""

    def declared(run: Run) -> Run:
        vars(run).setdefault("after" if after_target else "before", []).insert(0, add)  # the lowest comes first
        return run

    return declared


#: Arguments of several commands.
JSON = argument("--json", action="store_true", help="print one JSON object instead of the table")


def command(
    config: type[EngineConfig] | None, name: str = "", elsewhere: bool = False, passes_on: bool = False
) -> Callable[[Run], Command]:
    """The command of a function, called ``name`` if not as the function; its docstring has the summary, as a sentence,
    and examples. Its arguments that are not settings are declared by :func:`argument` between the two.

    config: the struct whose fields become flags; None for a command without an engine. elsewhere: the target is another
    process's, which may see other files. passes_on: words after ``--`` are for another program: ``words`` of the
    arguments.
    """

    def made(run: Run) -> Command:
        first, *rest = (run.__doc__ or "").splitlines()
        examples = tuple(line.strip() for line in rest if line.strip())
        summary = first[0].lower() + first[1:].rstrip(".")
        before, after = (tuple(vars(run).get(where, ())) for where in ("before", "after"))
        return Command(name or run.__name__, summary, examples, config, run, before, after, elsewhere, passes_on)

    return made


def report_error(name: str, error: BaseException) -> int:
    """Print what went wrong; returns the exit status: 2 for wrong settings, 1 otherwise."""
    print(f"foresay {name}: {error}", file=sys.stderr)
    return USAGE_ERROR if isinstance(error, ConfigurationError) else 1


def whole_number(wanted: str, fits: Callable[[int], bool]) -> Callable[[str], int]:
    """A parser of whole numbers for which ``fits`` is true; the error says what is wanted."""

    def number(text: str) -> int:
        if not text.isdecimal() or not fits(int(text)):
            raise ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return int(text)

    return number


#: A number of things.
COUNT = whole_number("a whole number of at least 1", lambda number: number >= 1)
