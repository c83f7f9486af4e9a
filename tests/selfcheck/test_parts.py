"""What a re-run asks for, where two texts differ, and how much may wait."""

from __future__ import annotations

import pytest

from foresay.server.metrics.selfcheck import Backlog, Difference, RecordedAnswer, difference
from foresay.spec.request import Grammar
from tests.selfcheck.checking import request


def test_the_plain_request_is_the_same_but_for_how_it_is_decoded() -> None:
    grammar = Grammar(text="start: /a+/")
    shown = {"logprobs": 3, "prompt_logprobs": 2}
    sent = request("r.1", seed=9, top_p=0.8, min_tokens=7, max_tokens=40, salt="ann", fork_of="r", **shown)
    sent.grammar = grammar
    plain = RecordedAnswer(sent, [1, 2, 3, 4]).plainly("again")
    assert (plain.id, plain.prompt, plain.grammar, plain.salt) == ("again", sent.prompt, grammar, "ann")
    assert (plain.speculate, plain.aside, plain.fork_of, plain.forced) == (False, True, None, None)
    params = plain.params
    assert (params.seed, params.top_p, params.max_tokens, params.min_tokens) == (9, 0.8, 4, 4)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    params.validate()


@pytest.mark.parametrize(
    ("plain", "found"),
    [
        ([1, 2, 3, 4], None),
        ([1, 9, 3, 4], Difference(1, 2, 9)),
        ([1, 2, 3], Difference(3, 4, None)),
        ([], Difference(0, 1, None)),
    ],
)
def test_the_first_difference_is_found(plain: list[int], found: Difference | None) -> None:
    assert difference([1, 2, 3, 4], plain) == found


def answer(id: str, tokens: int = 3) -> RecordedAnswer:
    return RecordedAnswer(request(id, seed=1), [300] * tokens)


async def test_the_oldest_give_way_by_number() -> None:
    backlog = Backlog(most_answers=3)
    for number in range(5):
        backlog.put(answer(f"r{number}"))
    assert (len(backlog), backlog.dropped, backlog.filled.is_set()) == (3, 2, True)
    first = backlog.take()
    assert first == answer("r2")
    backlog.put(first)
    assert (len(backlog), backlog.dropped) == (3, 2)
    assert [backlog.take().request.id for _ in range(3)] == ["r3", "r4", "r2"]
    assert not backlog.filled.is_set()
    with pytest.raises(IndexError):
        backlog.take()


async def test_the_oldest_give_way_by_their_bytes() -> None:
    backlog = Backlog(most_bytes=12_000)
    for number in range(6):
        backlog.put(answer(f"r{number}", tokens=1000))  # three bytes a token, packed
    assert (len(backlog), backlog.dropped) == (3, 3)
    backlog.put(answer("huge", tokens=5000))
    assert (len(backlog), backlog.dropped, backlog.filled.is_set()) == (0, 7, False)
