"""Warnings about what is not done as requested: in the response's body and in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from foresay.server.gateway.keys import CONTEXT
from foresay.server.schemas.shared import WARNINGS, RequestWarning, WarningCode
from foresay.spec.errors import Path, path_of, spelled

#: Most tools of one request that are named. The others are counted.
MOST_TOOLS_NAMED = 16
#: Agents send the same tools with every request: the log repeats a field's warning only after this many seconds.
QUIET_SECONDS = 60.0
_LONGEST_WORD = 64
#: Values for sentences that are never a client's text.
_OURS = ("name", "why", "hint")
log = logging.getLogger("foresay.server")


class Warned(msgspec.Struct, frozen=True):
    """A warning about the field at ``path``. sentence: the sentence, after the field's name."""

    code: WarningCode
    path: Path
    sentence: str

    @property
    def message(self) -> str:
        """The whole sentence."""
        return f"{spelled(self.path)}: {self.sentence}"

    @property
    def for_client(self) -> RequestWarning:
        """The warning in a response."""
        return RequestWarning(code=self.code, param=spelled(self.path), message=self.message)


def warning(code: WarningCode, field: str | Path, **values: object) -> Warned:
    """A warning about ``field``. values: values for the sentence; those that may be a client's text are shortened and
    quoted."""
    words = {
        name: _quoted(word) if isinstance(word, str) and name not in _OURS else word for name, word in values.items()
    }
    return Warned(code, path_of(field), WARNINGS[code].format(**words))


def tools_left_out(tools: Sequence[tuple[str | Path, str]]) -> tuple[Warned, ...]:
    """Warnings about tools that cannot be run here. tools: the field and the type of each."""
    listed = [warning("tool_left_out", path, kind=kind) for path, kind in tools[:MOST_TOOLS_NAMED]]
    if more := len(tools) - len(listed):
        sentence = f"{more:,} more of types that cannot be run here; the model does not see them"
        listed.append(Warned("tool_left_out", ("tools",), sentence))
    return tuple(listed)


def _quoted(text: str) -> str:
    """A client's word in a message: short, and on one line."""
    return repr(text if len(text) <= _LONGEST_WORD else f"{text[:_LONGEST_WORD]}..")


class WarningLog:
    """Writes warnings to the log: at most one a minute for each code and field, of unknown fields for all together."""

    def __init__(self) -> None:
        self._logged_at: dict[tuple[str, tuple[str, ...]], float] = {}

    def note(self, warnings: Iterable[Warned]) -> None:
        """Log warnings that were not logged recently."""
        now = time.monotonic()
        for one in warnings:
            ours = one.code != "unknown_field"  # else clients could have it remember any number of names
            about = one.code, tuple(step for step in one.path if ours and isinstance(step, str))
            if now - self._logged_at.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
                self._logged_at[about] = now
                log.warning("request %s: %s", CONTEXT.get().id or "-", one.message)
