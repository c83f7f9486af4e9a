"""What is done otherwise than a request asks: told in its answer, in a header of the response and in the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from foresay.server.gateway.caller import CONTEXT
from foresay.server.schemas.shared import RequestWarning, WarningCode
from foresay.spec.errors import Path, path_of, spelled

HEADER = "X-Foresay-Warnings"
#: Proxies refuse headers of more than some kilobytes; the answer's body has all of it.
LONGEST_HEADER, MOST_TOLD = 2000, 16
#: Of the tools of one request. The others are counted.
MOST_TOOLS_NAMED = 16
#: Agents send the same tools with every request: the log tells of a field once in so many seconds.
QUIET_SECONDS = 60.0
_LONGEST_WORD = 64
#: What a sentence needs and no client wrote.
_OURS = ("name", "why")
log = logging.getLogger("foresay.server")


#: What is said of each, behind the field.
_SENTENCES: dict[WarningCode, str] = {
    "tool_left_out": "tools of type {kind} cannot be run here; the model does not see this one",
    "max_tokens_clamped": (
        "{asked:,} tokens are more than the context leaves after the prompt; at most {room:,} are generated"
    ),
    "model_renamed": "{asked} is served by {name!r}",
    "hint_left_out": "this model's chat template cannot express {value}; the model does not see it",
    "format_not_enforced": "the model sees this grammar, but its calls are not constrained to it",
    "system_moved": "this model's chat template refuses system messages here; it is sent as the user's",
    "client_noise_left_out": "the model does not see {name} (--keep-client-noise shows it)",
    "compacted": "{results} results of tools, {thoughts} thoughts and {earlier} earlier items were left out",
    "not_followed": "not followed: {why}",
    "generic_tools": "this model's chat template has no tools; they are described in the prompt in a general format",
    "resumed": "the engine was replaced after output token {at_token:,}; the text may differ from there on",
}


class Warned(msgspec.Struct, frozen=True):
    """What is done otherwise than the field at ``path`` asks. said: in a sentence, after the field's name."""

    code: WarningCode
    path: Path
    said: str

    @property
    def message(self) -> str:
        """All of the sentence."""
        return f"{spelled(self.path)}: {self.said}"

    @property
    def told(self) -> RequestWarning:
        """As a client reads it."""
        return RequestWarning(code=self.code, param=spelled(self.path), message=self.message)


def warning(code: WarningCode, field: str | Path, **said: object) -> Warned:
    """What is done otherwise than ``field`` asks. said: what the sentence needs; texts that may be a client's are
    shortened and quoted."""
    words = {
        name: _quoted(word) if isinstance(word, str) and name not in _OURS else word for name, word in said.items()
    }
    return Warned(code, path_of(field), _SENTENCES[code].format(**words))


def tools_left_out(tools: Sequence[tuple[str | Path, str]]) -> tuple[Warned, ...]:
    """Of tools that cannot be run here. tools: the field and the type of each."""
    told = [warning("tool_left_out", place, kind=kind) for place, kind in tools[:MOST_TOOLS_NAMED]]
    if more := len(tools) - len(told):
        said = f"{more:,} more of types that cannot be run here; the model does not see them"
        told.append(Warned("tool_left_out", ("tools",), said))
    return tuple(told)


def _quoted(text: str) -> str:
    """A client's word in a message: short, and on one line."""
    return repr(text if len(text) <= _LONGEST_WORD else f"{text[:_LONGEST_WORD]}..")


def together(warnings: Iterable[Warned]) -> tuple[Warned, ...]:
    """Each of them once."""
    return tuple(dict.fromkeys(warnings))


def headers(warnings: Sequence[Warned]) -> dict[str, str]:
    """The header of a response: a JSON list of sentences, as many as fit."""
    if not warnings:
        return {}
    count = len(warnings)
    told = [one.message for one in warnings[:MOST_TOLD]]
    while len(value := json.dumps(_counted(told, count))) > LONGEST_HEADER and told:
        told.pop()
    return {HEADER: value}


def _counted(told: list[str], count: int) -> list[str]:
    left = count - len(told)
    return [*told, f"{left} more; the answer has all of them"] if left else told


class WarningLog:
    """Writes warnings into the log: of each code and field one a minute, however often agents repeat themselves."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def note(self, warnings: Iterable[Warned]) -> None:
        """Write what has not been said lately."""
        now = time.monotonic()
        for one in warnings:
            about = one.code, tuple(step for step in one.path if isinstance(step, str))
            if now - self._told.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
                self._told[about] = now
                log.warning("request %s: %s", CONTEXT.get().id or "-", one.message)
