"""What changes between the prompts of a client: everything after the first changed token must be prefilled again. So
what clients add that means nothing to the model and changes each time is left out; and where a long prompt differs from
an earlier one is reported in words.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foresay.server.text.warned import Warned, warning

if TYPE_CHECKING:
    from foresay.server.text.conversation import Offer
    from foresay.server.text.tokenizer import Tokenizer


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
Tokens = NDArray[np.uint32]


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


#: How many prompts are kept for comparison, of all clients together, and from how many tokens a prompt is long.
MOST_PROMPTS, LONG = 16, 1024
#: A prompt that continues another may tokenize its last few tokens differently: up to this many are ignored.
FEW = 64
#: Characters of a message to search for.
_SHOWN = 200


class LastPrompts:
    """The last long prompts, each with its owner. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[str, Tokens]] = deque(maxlen=MOST_PROMPTS)

    def compare(self, prompt: Sequence[int], owner: str) -> int | None:
        """Where a prompt differs from the most similar of the owner's last ones; it is then kept as the last. None if
        there are none, if it equals or continues one of them, or if it is short; short prompts are not kept."""
        if len(prompt) < LONG:
            return None
        tokens = np.array(prompt, np.uint32)
        alike = [(_common(tokens, other), -len(other)) for known, other in tuple(self._prompts) if known == owner]
        self._prompts.append((owner, tokens))
        common, length = max(alike, default=(len(tokens), -len(tokens)))
        return common if min(-length, len(tokens)) - common > FEW else None


def _common(one: Tokens, other: Tokens) -> int:
    """The number of tokens in the common prefix of two prompts."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def difference(
    prompt: Sequence[int], at: int, tokenizer: Tokenizer, text: str, messages: Sequence[dict[str, Any]], offer: Offer
) -> str:
    """Where token ``at`` of a prompt is, in words. text: the whole prompt's, made of ``messages`` and ``offer``."""
    before = len(tokenizer.decode(prompt[:at], skip_special_tokens=False))
    return f"differs at token {at:,} of {len(prompt):,}, in {_where(before, text, messages, offer)}"


def _where(at: int, text: str, messages: Sequence[dict[str, Any]], offer: Offer) -> str:
    begins = [(0, "what the chat template writes first")]
    if offer.listed:
        begins.append((text.find(f'"{offer.listed[0].name}"'), "the tools"))
    end = 0
    for number, message in enumerate(messages, start=1):
        content = message["content"].strip()[:_SHOWN]
        found = text.find(content, end) if content else -1
        if found > at:
            break
        if found >= 0:
            first = number == 1 and message["role"] == "system"
            begins.append((found, "the system message" if first else f"message {number} ({message['role']})"))
            end = found + len(content)
    begins.sort()
    return begins[bisect_right(begins, at, key=lambda one: one[0]) - 1][1]
