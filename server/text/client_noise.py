"""What clients add to prompts that means nothing to the model and changes each time is left out: everything after the
first changed token would have to be prefilled again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from foresay.server.text.warned import Warned, warning


class NoisePattern(NamedTuple):
    """Text to leave out. where: as the first line of the system message; or as a whole later system message, which is
    harmless unless the chat template moves it to the beginning. pattern: matches all of it. why: it changes each
    time."""

    client: str
    where: Literal["first line", "late message"]
    pattern: re.Pattern[str]
    why: str


#: A field of Claude Code's header, whose fields and their order depend on its version and address: ``cc_version=``
#: changes with every session, ``cch=`` with every request.
_FIELD = r"[\w.-]+=[^;\s]*"
CLIENT_NOISE = (
    NoisePattern(
        "Claude Code's x-anthropic-billing-header",
        "first line",
        re.compile(rf"x-anthropic-billing-header:\s*{_FIELD}(\s*;\s*{_FIELD})*\s*;?\s*", re.IGNORECASE),
        "changes with every session and only serves its billing",
    ),
    NoisePattern(
        "Claude Code's count of the tokens left",
        "late message",
        re.compile(r"(<total_tokens>\w+ tokens left</total_tokens>\s*)?(Token usage: \d+/\d+; -?\d+ remaining\s*)?"),
        "changes with every turn and counts another model's context",
    ),
)

Messages = list[dict[str, Any]]


def left_out(messages: Messages, hoists: Callable[[], bool]) -> tuple[Messages, tuple[Warned, ...]]:
    """Rendered messages without client noise, and one warning for each kind. hoists: whether the chat template moves
    late system messages to the beginning."""
    kept: Messages = []
    found: dict[NoisePattern, int] = {}
    for index, message in enumerate(messages):
        noise = _found(message, late=index > 0)
        if noise is None or (noise.where == "late message" and not hoists()):
            kept.append(message)
            continue
        found.setdefault(noise, index)
        rest = message["content"].lstrip().partition("\n")[2] if noise.where == "first line" else ""
        if rest.strip() or len(messages) == 1:  # templates cannot do without any message
            kept.append(message | {"content": rest})
    warnings = (
        warning("client_noise_left_out", ("messages", index, "content"), name=f"{noise.client}, which {noise.why}")
        for noise, index in found.items()
    )
    return kept, tuple(warnings)


def _found(message: dict[str, Any], late: bool) -> NoisePattern | None:
    text = message["content"] if message["role"] == "system" else ""
    where, text = ("late message", text) if late else ("first line", text.lstrip().partition("\n")[0])
    return next((one for one in CLIENT_NOISE if text and one.where == where and one.pattern.fullmatch(text)), None)
