"""Token ids to text: the bytes of single tokens, and incremental detokenization.

A token may end inside a character, and some tokenizers strip the space before a text's first word, so
``decode(a) + decode(b)`` is not ``decode(a + b)``. The detokenizer therefore decodes a short window::

    window   [ context: tokens whose text is out | fresh: tokens since the text last ended in a whole character ]
    text     |---------- emitted ----------------|---- new: goes out ----|-- U+FFFD..: held --|

Each token costs two decodes of that window, however long the text. (``tokenizers.DecodeStream`` is similar, but its
window grows without bound on bytes that never complete a character and on tokens without text, and it has no flush.)

``decode([id])`` does not give a single token's bytes: half a character becomes U+FFFD, and a space may be stripped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

REPLACEMENT = "\ufffd"
#: A character has at most four bytes, so at most three bytes at the end can be an incomplete character.
LONGEST_CHARACTER = 4
MOST_FRESH = 16
CONTEXT_TOKENS = 6


class IdDecoder(Protocol):
    """Decodes ids. ``special_ids`` are the tokens that ``decode`` leaves out on request."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """The text of ``ids``."""


class Detokenizer:
    """The text of one growing token sequence. ``step`` returns text that is certain, ``flush`` the rest.

    All pieces together equal the whole text decoded at once (minus the context's). context: preceding tokens, whose
    text is not repeated but determines leading spaces.
    """

    def __init__(self, decoder: IdDecoder, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._hidden = decoder.special_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context[-CONTEXT_TOKENS:] if token not in self._hidden]
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):  # the prompt ends inside a character, which cannot be completed
            self._window, text = [], ""
        self._emitted = len(text)
        self._fresh = 0

    def step(self, token: int) -> str:
        """Add one token; return the characters that it completes, possibly none."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        if whole == len(text):
            return self._emit_all(text)
        if self._fresh > LONGEST_CHARACTER:  # these bytes do not start a character
            whole = max(whole, len(text) - LONGEST_CHARACTER + 1)
        piece = text[self._emitted : whole]
        self._emitted = max(self._emitted, whole)
        if self._fresh > MOST_FRESH:
            self._shorten(len(text) - self._emitted)
        return piece

    def flush(self) -> str:
        """The sequence has ended: what was held back, with broken characters as U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False) if ids else ""

    def _emit_all(self, text: str) -> str:
        piece = text[self._emitted :]
        self._window = self._window[-self._fresh :]
        self._emitted, self._fresh = len(self._decode(self._window)), 0
        return piece

    def _shorten(self, held: int) -> None:
        self._window = self._window[-MOST_FRESH // 2 :]
        self._fresh = len(self._window)
        self._emitted = max(0, len(self._decode(self._window)) - held)


class StopSearch:
    """Cuts a growing text at the first stop string, and holds back only possible beginnings of one.

    The first is the one that ends earliest (the longest of those), so the cut depends only on the text and not on how
    it was split. include: whether the stop string stays in the text. Each character is read once per stop string,
    however much is held: for each stop string only the length of the matched prefix is kept.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._begun = [0] * len(self._stops)  # length of each stop string's prefix that the text ends with
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Add text; return the text that may be sent and the stop string found, if any. After that, feed no more."""
        if not self._stops:
            return piece, None
        for end, character in enumerate(piece, start=1):
            for index, (stop, fallbacks) in enumerate(self._stops):
                self._begun[index] = begun = _further(stop, fallbacks, self._begun[index], character)
                if begun == len(stop):
                    text = self.flush() + piece[:end]
                    return text if self._include else text[: len(text) - len(stop)], stop
        return self._released(piece), None

    def flush(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        self._begun = [0] * len(self._stops)
        return held

    def _released(self, piece: str) -> str:
        """Hold a piece; return the text in which no stop string can begin."""
        held = self._held + piece
        certain = len(held) - max(self._begun)
        self._held = held[certain:]
        return held[:certain]


@lru_cache(16)  # all choices of a request search for the same ones
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each prefix of ``stop``, the length of the longest shorter prefix that it ends with (Knuth-Morris-Pratt)."""
    lengths, longest = [0], 0
    for character in stop[1:]:
        longest = _further(stop, lengths, longest, character)
        lengths.append(longest)
    return tuple(lengths)


def _further(stop: str, fallbacks: Sequence[int], begun: int, character: str) -> int:
    """The matched length of ``stop`` after another character, given the matched length ``begun`` before."""
    while begun and stop[begun] != character:
        begun = fallbacks[begun - 1]
    return begun + (stop[begun] == character)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class SpelledToken(NamedTuple):
    r"""raw: the token's bytes. text: with incomplete characters as ``\xf0`` escapes. whole: whether there are none.
    numbers: the bytes for JSON; shared, so not to be modified.
    """

    raw: bytes
    text: str
    whole: bool
    numbers: list[int]

    @classmethod
    def of(cls, spelled: bytes) -> SpelledToken:
        """Make it from the bytes."""
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
        """The token's bytes; empty if it has no text (a placeholder id)."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = SpelledToken.of(self.raw(token))
        return known

    def is_stray(self, token: int) -> bool:
        """Whether it is a byte-fallback token, which stands for a single byte (sentencepiece)."""
        return "ByteFallback" in self._decoders and bool(_BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""))

    def raw(self, token: int) -> bytes:
        """Its bytes, without caching."""
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
    """The types of a decoder and of its parts."""
    return frozenset({state["type"]}).union(*(_decoders(one) for one in state.get("decoders", ())))


def _of_byte_level(piece: str) -> bytes:
    """Bytes from GPT-2's alphabet, in which every byte is a printable character; other text is encoded as UTF-8."""
    alphabet = _byte_level_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
