"""Tokens by themselves: their bytes together are the bytes of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from foresay.server.text.detokenize import SpelledToken, Spelling
from tests.server.conftest import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL, SENTENCEPIECE = byte_level_tokenizer(), sentencepiece_tokenizer()


@given(some.text(max_size=40))
def test_the_bytes_of_all_tokens_are_those_of_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(BYTE_LEVEL.token_bytes(token) for token in ids) == text.encode()
    ids = SENTENCEPIECE.encode(text)
    spelled = b"".join(SENTENCEPIECE.token_bytes(token) for token in ids).decode()
    # The tokenizer takes U+2581 for a space, and puts one in front of a text that has none.
    assert spelled.removeprefix(" ") == text.replace("\u2581", " ").removeprefix(" ")


def test_special_tokens_stand_for_their_names() -> None:
    assert BYTE_LEVEL.token_bytes(0) == b"<|end|>"
    assert SENTENCEPIECE.token_bytes(2) == b"</s>"


def test_an_id_that_is_no_token_stands_for_nothing() -> None:
    assert BYTE_LEVEL.spelled(5000) == SpelledToken(b"", "", True, [])


def test_half_a_character_is_escaped() -> None:
    first, *_ = SENTENCEPIECE.encode("🦊")[1:]
    assert SENTENCEPIECE.spelled(first) == SpelledToken(b"\xf0", "\\xf0", False, [0xF0])
    assert SpelledToken.of(b" \xf0\x9f") == SpelledToken(b" \xf0\x9f", " \\xf0\\x9f", False, [0x20, 0xF0, 0x9F])


def test_other_tokenizers_are_asked_to_decode() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "fox": 1, "##es": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    spelling = Spelling(backend)
    assert [spelling.of(token).text for token in (1, 2)] == ["fox", "##es"]
    without = Spelling(Backend(models.WordLevel({"fox": 0}, unk_token="fox")))
    assert without.of(0).text == "fox"
