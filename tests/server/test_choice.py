"""One choice: the same text, counts and ending however the tokens are split into steps."""

from __future__ import annotations

import itertools

import pytest

from foresay.server.api.common.answer import drafting_steps
from foresay.server.text.choice import Choice, Piece
from foresay.spec.request import Delta, Origin, Request
from foresay.spec.sampling import SamplingParams

END = 0


def request(**params) -> Request:
    return Request(id="r", prompt=[5, 6], params=SamplingParams(**params))


def partitions(tokens):
    """Every way to cut a list into runs (of the first eight tokens; the rest is one run)."""
    head = min(len(tokens), 8)
    for cuts in range(1 << (head - 1)):
        ends = [place + 1 for place in range(head - 1) if cuts >> place & 1]
        yield [tokens[a:b] for a, b in itertools.pairwise([0, *ends, len(tokens)])]


def answer(choice: Choice, runs, reason="length", stop_token=None) -> tuple[str, list[int], list[Piece]]:
    """Feed runs as an engine would: a run that is cut is followed by one empty last delta."""
    pieces, finished = [], False
    for number, run in enumerate(runs):
        last = number == len(runs) - 1
        delta = Delta(id="r", tokens=list(run), finish_reason=reason if last else None)
        delta.stop_token = stop_token if last else None
        pieces.append(choice.take(delta))
        finished = last
        if pieces[-1].finish_at is not None:
            break
    if not finished:
        pieces.append(choice.take(Delta(id="r", tokens=[9, 9])))  # a step that was already under way
        pieces.append(choice.take(Delta(id="r", tokens=[], finish_reason="stop")))
    return "".join(piece.text for piece in pieces), [t for piece in pieces for t in piece.token_ids], pieces


@pytest.mark.parametrize("stop", [" fox", "x", "ox t", "There", " a 🦊"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_alike_in_every_split(tokenizer, stop, include):
    text = "Once a fox there a 🦊 There!"
    tokens = tokenizer.encode(text)
    ends = [count for count in range(len(tokens) + 1) if stop in tokenizer.decode(tokens[:count])]
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    for runs in partitions(tokens):
        choice = Choice(request(), tokenizer, [END], stop=(stop,), include_stop=include)
        output, ids, _ = answer(choice, runs)
        assert output == expected
        assert ids == tokens[: ends[0]]
        assert choice.completion_tokens == ends[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_the_engine_learns_the_token_that_completed_the_stop_string(tokenizer):
    tokens = tokenizer.encode("abcdefg")
    choice = Choice(request(), tokenizer, [END], stop=("d",))
    _, _, pieces = answer(choice, [tokens[:2], tokens[2:6], tokens[6:]])
    assert [piece.finish_at for piece in pieces] == [None, 4, None, None]


def test_a_stop_string_before_the_cap_in_the_same_run_wins(tokenizer):
    tokens = tokenizer.encode("abcdefg")
    choice = Choice(request(max_tokens=7), tokenizer, [END], stop=("d",))
    text, _, pieces = answer(choice, [tokens], reason="length")
    assert (text, choice.finish_reason, choice.completion_tokens) == ("abc", "stop", 4)
    assert pieces[-1].finish_at == 4, "the engine has ended the request by itself, but its trace has to know"


def test_accepted_tokens_past_the_cut_are_not_counted(tokenizer):
    tokens = tokenizer.encode("abcdefg")
    choice = Choice(request(), tokenizer, [END], stop=("d",))
    choice.take(Delta(id="r", tokens=tokens[:1]))
    origin = Origin(2, "ngram", [-1, 0, 1, 2, 3, 4], 0, [1, 2, 3, 4, 5], {})
    choice.take(Delta(id="r", tokens=tokens[1:], finish_reason="length", origin=origin))
    assert drafting_steps(choice) == [(5, 3)]  # five drafted; of the five accepted, b, c and d are in the text


def test_a_stop_token_is_named_and_its_text_left_out(tokenizer):
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for include, expected in ((False, "a"), (True, "ab")):
        choice = Choice(request(stop_token_ids=(b,)), tokenizer, [END], include_stop=include)
        text, _, _ = answer(choice, [[a, b]], "stop", b)
        assert (text, choice.stop_reason) == (expected, b)


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    tokens = tokenizer.encode("a🐍")
    choice = Choice(request(), tokenizer, [END])
    assert answer(choice, [tokens[:-1]])[0] == tokenizer.decode(tokens[:-1])


def test_no_stop_string_is_looked_for_below_min_tokens(tokenizer):
    tokens = tokenizer.encode("x.y.z.")
    for runs in partitions(tokens):
        choice = Choice(request(min_tokens=3), tokenizer, [END], stop=(".",))
        text, _, _ = answer(choice, runs)
        assert (text, choice.completion_tokens) == ("x.y", 4)
