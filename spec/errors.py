"""The exceptions, as one tree.

::

    ForesayError
    ├── InvalidRequest          the request asks for something impossible: names the field      -> 400
    │   └── ContextLengthExceeded   prompt and output do not fit the model                      -> 400
    ├── ConfigurationError      flags, files or models do not fit together: names the flag
    └── NumericalError          the model produced NaN: ends the one sequence it happened to    -> 500
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

#: The path to a field: field names and list indices.
Path = tuple[str | int, ...]
#: The arguments of :class:`InvalidRequest`, for sending it to another process.
Fault = tuple[Path, str, str]

_STEP = re.compile(r"\[(\d+)\]|\.?(\[[^\d]*\]|[^.\[]+)")


def path_of(field: str | Path) -> Path:
    """``messages[3].content`` as a path."""
    if not isinstance(field, str):
        return field
    return tuple(int(number) if number else name for number, name in _STEP.findall(field))


def spelled(path: Path) -> str:
    """A path as clients read it: ``messages[3].content``."""
    steps = [f"[{step}]" if isinstance(step, int) else step if step[:1] == "[" else f".{step}" for step in path]
    return "".join(steps).removeprefix(".")


class ForesayError(Exception):
    """Base of every error that a user of Foresay can get."""


class InvalidRequest(ForesayError):
    """A request that cannot be served. path: to the field; it may be given as ``messages[3].content``. wrong: the part
    of the message after the field's name, if it begins with a space, a colon or a point; otherwise the whole message.
    before: the part of the message before the name.
    """

    code: str | None = None

    def __init__(self, path: str | Path, wrong: str, before: str = "") -> None:
        self.path, self.wrong, self.before = path_of(path), wrong, before
        super().__init__(*self.fault)

    @property
    def fault(self) -> Fault:
        """The arguments that make it again."""
        return self.path, self.wrong, self.before

    @property
    def param(self) -> str:
        """The field's name as the client wrote it; empty for the request as a whole."""
        return spelled(self.path)

    @property
    def message(self) -> str:
        """What is wrong, in a sentence."""
        names = self.before or self.wrong.startswith((" ", ":", "."))
        return f"{self.before}{self.param}{self.wrong}" if names else self.wrong

    def __str__(self) -> str:
        return self.message


@contextmanager
def inside(*steps: str | int) -> Iterator[None]:
    """Errors raised in this context get ``steps`` in front of their path."""
    try:
        yield
    except InvalidRequest as error:
        error.path = (*steps, *error.path)
        raise


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context or the KV cache."""

    code = "context_length_exceeded"


class ConfigurationError(ForesayError):
    """Settings, files or models that do not fit together. The message names the flag and what would be right."""


class NumericalError(ForesayError):
    """The model's logits hold NaN or only minus infinity; no token can be sampled from them."""
