"""What a re-run asks for, where two texts differ, and how much may wait."""

from __future__ import annotations

from foresay.server.metrics.selfcheck import RecordedAnswer, difference
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


def test_the_first_difference_is_found() -> None:
    for plain, found in (([1, 2, 3, 4], None), ([1, 9, 3, 4], 1), ([1, 2, 3], 3), ([], 0)):
        assert difference([1, 2, 3, 4], plain) == found
