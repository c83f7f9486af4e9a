"""A model's tokens by what they stand for, whatever ids and spelling its tokenizer has for them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from server.engine.vocabulary import tokenizer
from server.text.spelling import Spelling
from verifier.model.config import ModelConfig


@dataclass(frozen=True)
class Lexicon:
    """The tokens that a model can read, by id.

    texts: the bytes of each ordinary token. marks: the names of those that were added as a whole; special ones are in
    no text. begin: what the tokenizer puts in front of a text. ends: what ends one, the tokenizer's own choice first.
    stray: tokens for a byte that no other token has.
    """

    texts: dict[int, bytes]
    marks: dict[int, str]
    begin: int | None
    ends: tuple[int, ...]
    stray: frozenset[int]

    @classmethod
    def read(cls, directory: Path, model: ModelConfig) -> Lexicon | None:
        """From a checkpoint's directory; None where no tokenizer.json is, ConfigurationError if it is damaged."""
        backend = tokenizer(directory)
        if backend is None:
            return None
        spelling, added = Spelling(backend), backend.get_added_tokens_decoder()
        ids = sorted(id for id in backend.get_vocab(with_added_tokens=True).values() if id < model.vocab_size)
        texts = {id: spelling.raw(id) for id in ids if id not in added or not added[id].special}
        usual = backend.token_to_id(_end_of_text(directory))
        begin = backend.encode("").ids
        return cls(
            texts={id: text for id, text in texts.items() if text},
            marks={id: added[id].content for id in ids if id in added},
            begin=begin[0] if begin and begin[0] in {*ids} - {*model.eos_token_ids} else None,
            ends=tuple(sorted(set(model.eos_token_ids).intersection(ids), key=lambda id: (id != usual, id))),
            stray=frozenset(id for id in texts if spelling.is_stray(id)),
        )

    def __len__(self) -> int:
        return len(self.texts.keys() | self.marks.keys())

    @cached_property
    def of_text(self) -> dict[bytes, int]:
        """The token that is written for these bytes; of several the first, and no stray one if there is another."""
        ids = sorted(self.texts, key=lambda id: (id not in self.stray, -id))
        return {self.texts[id]: id for id in ids}

    @cached_property
    def of_mark(self) -> dict[str, int]:
        """The added token of this name."""
        return {mark: id for id, mark in self.marks.items()}

    def ending_of(self, text: bytes) -> int | None:
        """The longest token with which these bytes end; None if there is none."""
        endings = (self.of_text.get(text[start:]) for start in range(len(text)))
        return next((id for id in endings if id is not None), None)


def _end_of_text(directory: Path) -> str:
    """The ``eos_token`` of tokenizer_config.json; empty where it names none."""
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads((directory / "tokenizer_config.json").read_bytes()).get("eos_token")
        return str(named["content"] if isinstance(named, dict) else named or "")
    return ""
