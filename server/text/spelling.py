"""What one token is by itself: its bytes, and those bytes as text.

``decode([id])`` cannot say: half a character becomes U+FFFD, and some tokenizers strip the space in front of a word.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class SpelledToken(NamedTuple):
    r"""raw: the token's bytes. text: those that are no whole character as ``\xf0`` escapes. whole: whether there are
    none such. numbers: the bytes for JSON; shared, so nobody may change them.
    """

    raw: bytes
    text: str
    whole: bool
    numbers: list[int]

    @classmethod
    def of(cls, spelled: bytes) -> SpelledToken:
        """From the bytes."""
        try:
            text, whole = spelled.decode(), True
        except UnicodeDecodeError:
            text, whole = spelled.decode(errors="backslashreplace"), False
        return cls(spelled, text, whole, list(spelled))


class Spelling:
    """The bytes of every token of a tokenizer (its Rust part). Safe to use from several threads."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._literal = {id: entry.content for id, entry in backend.get_added_tokens_decoder().items()}
        self._decoders = _decoders(json.loads(backend.decoder.__getstate__())) if backend.decoder else frozenset()
        self._known: dict[int, SpelledToken] = {}

    def of(self, token: int) -> SpelledToken:
        """The token's bytes; none if it is no piece of text (a placeholder id)."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = SpelledToken.of(self.raw(token))
        return known

    def is_stray(self, token: int) -> bool:
        """Whether it stands for one byte that no other token of the text has (sentencepiece's byte fallback)."""
        return "ByteFallback" in self._decoders and bool(_BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""))

    def raw(self, token: int) -> bytes:
        """Its bytes alone; nothing is kept of it."""
        if token in self._literal:
            return str(self._literal[token]).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return _of_byte_level(piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte and "ByteFallback" in self._decoders:
            return bytes([int(byte[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            return str(piece).replace(_SPACE, " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()


def _decoders(state: dict[str, Any]) -> frozenset[str]:
    """The kinds of a decoder and of those it is made of."""
    return frozenset({state["type"]}).union(*(_decoders(one) for one in state.get("decoders", ())))


def _of_byte_level(piece: str) -> bytes:
    """GPT-2's alphabet, in which every byte is a printable character; others stand for themselves."""
    alphabet = _byte_level_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
