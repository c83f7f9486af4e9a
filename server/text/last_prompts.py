"""Where a long prompt differs from an earlier one, in words: everything after that must be prefilled again."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foresay.server.text.conversation import Offer
    from foresay.server.text.tokenizer import Tokenizer

#: How many prompts are kept for comparison, of all clients together, and from how many tokens a prompt is long.
MOST_PROMPTS, LONG = 16, 1024
#: A prompt that continues another may tokenize its last few tokens differently: up to this many are ignored.
FEW = 64
_WIDTH = array("I").itemsize
#: Characters of a message to search for.
_SHOWN = 200


class LastPrompts:
    """The last long prompts, each with its owner. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[str, bytes]] = deque(maxlen=MOST_PROMPTS)

    def compare(self, prompt: Sequence[int], owner: str) -> int | None:
        """Where a prompt differs from the most similar of the owner's last ones; it is then kept as the last. None if
        there are none, if it equals or continues one of them, or if it is short; short prompts are not kept."""
        if len(prompt) < LONG:
            return None
        data = array("I", prompt).tobytes()
        alike = [(_common(data, other), -len(other)) for known, other in tuple(self._prompts) if known == owner]
        self._prompts.append((owner, data))
        common, length = max(alike, default=(len(prompt), -len(data)))
        return common if min(-length, len(data)) // _WIDTH - common > FEW else None


def _common(one: bytes, other: bytes) -> int:
    """The number of tokens in the common prefix of two prompts."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low


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
