"""Whether a prompt fits into the model's context, told before it is read wherever its length alone tells."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import msgspec
from tokenizers import Tokenizer, pre_tokenizers

from spec.errors import ContextLengthExceeded

#: Steps that leave every character in the text, and by what at most they shorten it: a composed character stands for up
#: to 4 others, a compatibility character for up to 18 (Unicode Standard Annex 15).
_SHORTENS = {"NFC": 4, "NFD": 1, "NFKC": 18, "NFKD": 18, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPS = {"ByteLevel", "Metaspace", "Digits", "Split"}


class Room(msgspec.Struct, frozen=True):
    """What a prompt has to fit into. field: that holds it; longest: tokens of prompt and completion together."""

    field: str
    longest: int

    def check(self, tokens: int, completion: int | None = None, about: str = "") -> None:
        """Raise unless a prompt of so many tokens fits. completion: tokens asked for, one at least if that is not known
        yet. about: what is to be said of the number.
        """
        asked = tokens + (completion or 1)
        if asked > self.longest:
            least = about if completion else "at least "
            raise ContextLengthExceeded(
                self.field,
                f"This model's maximum context length is {self.longest} tokens. However, you requested {least}{asked} "
                f"tokens ({about}{tokens} in the prompt, {completion or 1} in the completion).",
            )


def most_characters(backend: Tokenizer) -> int | None:
    """How many characters of a text one token can stand for; None if it may be any number of them."""
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    shortens = [_shortens(step) for step in _steps(backend.normalizer, "normalizers")]
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    keeps = all(step["type"] in _KEEPS and step.get("behavior") != "Removed" for step in splits)
    if not keeps or None in shortens or any(entry.lstrip or entry.rstrip for entry in added):
        return None
    if not _reads_everything(backend.model, vocabulary, any(step["type"] == "ByteLevel" for step in splits)):
        return None
    return max(map(len, vocabulary), default=1) * prod(factor or 1 for factor in shortens)


def _steps(part: Any, inside: str) -> list[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer does, one after the other."""
    if part is None:
        return []
    given = json.loads(part.__getstate__())
    return list(given[inside]) if given["type"] == "Sequence" else [given]


def _shortens(step: dict[str, Any]) -> int | None:
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return 1 if old is not None and len(old) <= len(step["content"]) else None
    return _SHORTENS.get(step["type"])


def _reads_everything(model: Any, vocabulary: dict[str, int], by_bytes: bool) -> bool:
    """Whether no character is left out, or taken together with others as unknown."""
    if type(model).__name__ != "BPE":
        return False
    alphabet = pre_tokenizers.ByteLevel.alphabet() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    if (by_bytes or model.byte_fallback) and all(letter in vocabulary for letter in alphabet):
        return True
    return model.unk_token is not None and not model.fuse_unk
