"""Pieces of text add up to the decoded whole, and a conversation is read in the tokens it was said in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from foresay.server.text.choice import Detokenizer, StopSearch
from foresay.server.text.prompt import RenderedPrompt
from foresay.server.text.tokenizer import SpelledToken, Spelling, Tokenizer
from tests.server.conftest import byte_level_tokenizer, sentencepiece_tokenizer

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from([FAMILY, "🏳️\u200d🌈", "é", "e\u0301", " fox", "你好", "\ufffd", "\n"])
    ),
    max_size=12,
).map("".join)
# Fixtures are shared by all examples on purpose: a tokenizer does not change.
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=200)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*[detokenizer.step(token) for token in ids], detokenizer.flush()]


@relaxed
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_piece_ever_holds_half_a_character(tokenizer, text):
    assert all("\ufffd" not in piece for piece in pieces_of(tokenizer, tokenizer.encode(text)))


@relaxed
@given(data=st.data())
def test_any_token_ids_add_up_to_their_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@relaxed
@given(data=st.data())
def test_bytes_that_never_become_characters_add_up_too(tokenizer, data):
    single = [tokenizer.encode(character)[0] for character in ("é", "你", "🦊")]
    tails = [tokenizer.encode(character)[-1] for character in ("ö", "界", "🐍")]
    ids = data.draw(st.lists(st.sampled_from(single + tails + tokenizer.encode("a")), max_size=80))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_is_released_with_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("🐍")
    assert len(ids) > 1
    assert pieces_of(tokenizer, ids) == [""] * (len(ids) - 1) + ["🐍", ""]


def test_special_tokens_are_shown_only_on_request(tokenizer):
    ids = [*tokenizer.encode("a"), 0, *tokenizer.encode("b")]
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == "ab"
    assert "".join(map(shown.step, ids)) + shown.flush() == "a<|end|>b"


class CountingDecoder(Tokenizer):
    """Remembers the most ids it was asked to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = tokenizer.special_ids
        self.most = 0
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.most = max(self.most, len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ["words", "broken", "special", "unknown"])
def test_a_token_costs_the_same_however_long_the_text(tokenizer, kind):
    lone = tokenizer.encode("é")[-1]
    ids = {"words": tokenizer.encode("Once upon a fox "), "broken": [lone], "special": [0], "unknown": [100_000]}[kind]
    decoder = CountingDecoder(tokenizer)
    detokenizer = Detokenizer(decoder)
    for token in itertools.islice(itertools.cycle(ids), 2000):
        detokenizer.step(token)
    assert decoder.most <= 32


@relaxed
@given(text=st.text(alphabet="ab 你好é🦊👩\u200d", max_size=30).filter(lambda text: not text.startswith(" ")))
def test_byte_tokens_and_stripped_spaces_add_up_after_a_prompt(sentencepiece, text):
    whole = sentencepiece.encode("a b " + text, add_special_tokens=False)
    prompt = sentencepiece.encode("a b", add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    pieces = pieces_of(sentencepiece, whole[len(prompt) :], prompt)
    assert "".join(pieces) == " " + text


def test_a_new_text_loses_its_leading_space_and_a_continued_one_keeps_it(sentencepiece):
    ids = sentencepiece.encode("a b", add_special_tokens=False)
    assert "".join(pieces_of(sentencepiece, ids)) == "a b"
    assert "".join(pieces_of(sentencepiece, ids, context=ids)) == " a b"


def test_a_prompt_that_ends_inside_a_character_is_no_context(tokenizer):
    ids = tokenizer.encode("🦊") if len(tokenizer.encode("🦊")) > 1 else tokenizer.encode("🐍")
    pieces = pieces_of(tokenizer, [*ids[1:], *tokenizer.encode("a")], context=ids[:1])
    assert "".join(pieces) == tokenizer.decode([*ids[1:], *tokenizer.encode("a")])


# -- stop strings ------------------------------------------------------------------------------------------------------


def cut_by_reading(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What a reader who goes character by character would do: the reference."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def cut_in_pieces(pieces: Sequence[str], stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    search = StopSearch(stops, include)
    out = ""
    for piece in pieces:
        released, stop = search.feed(piece)
        out += released
        if stop is not None:
            return out, stop
    return out + search.flush(), None


@pytest.mark.parametrize(
    "stops", [["b"], ["ab"], ["aab", "b"], ["abab"], ["aa", "aaa"], ["ba", "aba"], ["aba", "bb", "c"]]
)
def test_every_short_text_is_cut_at_the_first_stop_in_every_split(stops):
    for text in map("".join, itertools.product("abc", repeat=6)):
        expected = cut_by_reading(text, stops)
        for cuts in range(1 << 5):
            ends = [place + 1 for place in range(5) if cuts >> place & 1]
            pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *ends, 6])]
            assert cut_in_pieces(pieces, stops) == expected


@relaxed
@given(
    text=st.text(alphabet="ab\n🦊", max_size=40),
    stops=st.lists(st.text(alphabet="ab\n🦊", min_size=1, max_size=6), min_size=1, max_size=16),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_long_texts_too(text, stops, cuts):
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *sorted(cuts), 41])]
    assert cut_in_pieces(pieces, stops) == cut_by_reading(text, stops)


def test_the_stop_string_stays_on_request():
    assert cut_in_pieces(["one tw", "o three"], ["two"], include=True) == ("one two", "two")


def test_only_what_may_become_a_stop_string_is_held_back():
    search = StopSearch(["\n\nQ:", "END"])
    assert search.feed("The answer is 7.\n") == ("The answer is 7.", None)
    assert search.feed("Then") == ("\nThen", None)
    assert search.feed(" E") == (" ", None)
    assert search.feed("N") == ("", None)
    assert search.flush() == "EN"


BYTE_LEVEL, SENTENCEPIECE = byte_level_tokenizer(), sentencepiece_tokenizer()


@given(st.text(max_size=40))
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


def test_other_tokenizers_decode_by_themselves() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "fox": 1, "##es": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    spelling = Spelling(backend)
    assert [spelling.of(token).text for token in (1, 2)] == ["fox", "##es"]
    without = Spelling(Backend(models.WordLevel({"fox": 0}, unk_token="fox")))
    assert without.of(0).text == "fox"


def letter_by_letter(text: str) -> list[int]:
    return [token for letter in text for token in BYTE_LEVEL.encode(letter, False)]


def test_earlier_text_keeps_its_tokens():
    output = [*letter_by_letter("Once upon a time"), *BYTE_LEVEL.encode("<|end|>", False)]
    assert output != BYTE_LEVEL.encode("Once upon a time<|end|>", False)
    ids = BYTE_LEVEL.encode_after(output, RenderedPrompt("Once upon a time<|end|><|user|>The fox"), False)
    assert ids == [*output, *BYTE_LEVEL.encode("<|user|>The fox", False)]


def test_another_beginning_is_encoded_as_ever():
    output = letter_by_letter("Once upon a tart")
    text = "Once upon a time"
    assert BYTE_LEVEL.encode_after(output, RenderedPrompt(text), False) == BYTE_LEVEL.encode(text, False)
    assert BYTE_LEVEL.encode_after([], RenderedPrompt(text), False) == BYTE_LEVEL.encode(text, False)


def test_half_a_character_at_the_end_is_encoded_as_ever():
    fox = BYTE_LEVEL.encode("🦊", False)
    text = "a 🦊"
    output = [*BYTE_LEVEL.encode("a ", False), *fox[:-1]]
    if len(fox) > 1:
        assert BYTE_LEVEL.encode_after(output, RenderedPrompt(text), False) == BYTE_LEVEL.encode(text, False)


@given(st.text(max_size=30), st.text(max_size=30), st.booleans())
def test_the_text_is_always_the_same(before, after, special):
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        text = before + after
        plain = tokenizer.encode(text, special)
        ids = tokenizer.encode_after(tokenizer.encode(before, special), RenderedPrompt(text), special)
        if ids != plain:
            assert tokenizer.decode(ids, False) == text
