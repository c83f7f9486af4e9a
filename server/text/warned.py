"""Warnings about what is not done as requested, as a response has them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from foresay.server.schemas.shared import WARNINGS, RequestWarning, WarningCode
from foresay.spec.errors import Path, path_of, spelled

#: Most tools of one request that are named. The others are counted.
MOST_TOOLS_NAMED = 16
_LONGEST_WORD = 64
#: Values for sentences that are never a client's text.
_OURS = ("name", "why")


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
