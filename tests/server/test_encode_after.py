"""A conversation that goes on is read in the tokens it was said in, not in those the tokenizer would choose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foresay.server.text.prompt import Rendered
from tests.server.conftest import byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()


def letter_by_letter(text: str) -> list[int]:
    return [token for letter in text for token in TOKENIZER.encode(letter, False)]


def test_what_was_said_keeps_its_tokens():
    said = [*letter_by_letter("Once upon a time"), *TOKENIZER.encode("<|end|>", False)]
    assert said != TOKENIZER.encode("Once upon a time<|end|>", False)
    ids = TOKENIZER.encode_after(said, Rendered("Once upon a time<|end|><|user|>The fox"), False)
    assert ids == [*said, *TOKENIZER.encode("<|user|>The fox", False)]


def test_another_beginning_is_encoded_as_ever():
    said = letter_by_letter("Once upon a tart")
    text = "Once upon a time"
    assert TOKENIZER.encode_after(said, Rendered(text), False) == TOKENIZER.encode(text, False)
    assert TOKENIZER.encode_after([], Rendered(text), False) == TOKENIZER.encode(text, False)


def test_half_a_character_at_the_end_is_encoded_as_ever():
    fox = TOKENIZER.encode("🦊", False)
    text = "a 🦊"
    said = [*TOKENIZER.encode("a ", False), *fox[:-1]]
    if len(fox) > 1:
        assert TOKENIZER.encode_after(said, Rendered(text), False) == TOKENIZER.encode(text, False)


@given(st.text(max_size=30), st.text(max_size=30), st.booleans())
def test_the_text_is_always_the_same(before, after, special):
    for tokenizer in (TOKENIZER, SENTENCEPIECE):
        text = before + after
        plain = tokenizer.encode(text, special)
        ids = tokenizer.encode_after(tokenizer.encode(before, special), Rendered(text), special)
        if ids != plain:
            assert tokenizer.decode(ids, False) == text
