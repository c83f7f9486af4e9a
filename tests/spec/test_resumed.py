"""A request that another engine began: the text goes on as if there had been one, whatever the request asks for."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Progress
from foresay.spec.sampling import SamplingParams
from tests.combinations import alternating
from tests.spec.grammars import Automaton
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, TableModel, plain

VOCAB, END, LENGTH = 32, 31, 24
PROMPT = [3, 1, 2, 9, 9]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_k": 8},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bans": {"bad_words": tuple((a, b) for a in range(VOCAB) for b in range(VOCAB) if (a + b) % 3 == 0)},
    "a floor": {"min_tokens": 15, "stop_token_ids": (4, 5)},
    "ends": {"stop_token_ids": (4, 5)},
    "logprobs": {"logprobs": 2},
}


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "seed": 5} | fields)


def harness(model: TableModel, **options: Any) -> Harness:
    return Harness(model, Guesser(model, 0.8), (3, 2), eos=[END], **options)


def progress_of(answer: Answer, count: int) -> Progress:
    """As it stood behind ``count`` tokens."""
    return Progress(committed=answer.tokens[:count], arrived=0.0, cached_tokens=2)


def resumed(model: TableModel, whole: Answer, count: int, params: SamplingParams, grammar: Automaton | None) -> Answer:
    """The rest of an answer, by an engine that others ask too."""
    other = harness(model)
    other.add("beside", [7, 7], sampling(seed=1))
    other.step()
    other.add("only", PROMPT, params, grammar=grammar, progress=progress_of(whole, count))
    return other.run()["only"]


@pytest.mark.parametrize(("name", "grammatical"), alternating(list(OPTIONS), [False, True]))
def test_it_goes_on_at_the_next_token(name: str, grammatical: bool) -> None:
    model, params = TableModel(3), sampling(**OPTIONS[name])
    grammar = Automaton(4, VOCAB, [END]) if grammatical else None
    whole = harness(model).answer(PROMPT, params, grammar=grammar and grammar.fork())
    assert whole.plain == plain(model, PROMPT, params, [END], grammar=grammar)
    for count in range(len(whole.tokens)):
        rest = resumed(model, whole, count, params, grammar and grammar.fork())
        assert rest.tokens == whole.tokens[count:], count
        assert (rest.last.finish_reason, rest.last.stop_token) == (whole.last.finish_reason, whole.last.stop_token)
        if params.logprobs:
            assert rest.logprobs == whole.logprobs[count:]
        assert rest.last.cached_tokens == (2 if count else 0), "as the first engine told, who had told it"


def test_recorded_draws_go_on_where_they_stood() -> None:
    model, record = TableModel(4), [random.Random(1).randrange(VOCAB - 1) for _ in range(LENGTH)]
    other = harness(model)
    past = Progress(committed=record[:9], arrived=0.0)
    other.add("only", PROMPT, sampling(), forced=record, progress=past)
    assert other.run()["only"].tokens == record[9:]


def test_a_prompt_is_scored_once() -> None:
    model, params = TableModel(3), sampling(logprobs=1, prompt_logprobs=1)
    whole = harness(model).answer(PROMPT, params)
    entries = whole.deltas[0].prompt_logprobs
    assert entries is not None and len(entries) == len(PROMPT)
    assert resumed(model, whole, 0, params, None).deltas[0].prompt_logprobs == entries
    other = harness(model)
    other.add("only", PROMPT, params, progress=progress_of(whole, 6))
    assert all(delta.prompt_logprobs is None for delta in other.run()["only"].deltas)
    assert other.verifier.passes[0][0].logits == "last", "and not read for it again"


def test_choices_go_on_each_for_itself() -> None:
    """One that is over, one that had nothing yet, and their leader in the middle."""
    model = TableModel(3)
    wholes = {seed: harness(model).answer(PROMPT, sampling(seed=seed, ignore_eos=True)) for seed in range(3)}
    other = harness(model)
    for seed, count in ((0, 11), (2, 0)):
        past = progress_of(wholes[seed], count)
        other.add(str(seed), PROMPT, sampling(seed=seed, ignore_eos=True), fork_of="0" if seed else None, progress=past)
    other.add("late", PROMPT, sampling(seed=1, ignore_eos=True), fork_of="gone", progress=progress_of(wholes[1], 3))
    answers = other.run()
    assert answers["0"].tokens == wholes[0].tokens[11:]
    assert answers["2"].tokens == wholes[2].tokens
    assert answers["late"].tokens == wholes[1].tokens[3:]


def test_what_is_no_token_of_the_model_is_refused() -> None:
    other = harness(TableModel(3))
    with pytest.raises(InvalidRequest, match="committed"):
        other.add("only", PROMPT, sampling(), progress=Progress(committed=[VOCAB], arrived=0.0))


def test_it_crosses_processes() -> None:
    past = Progress(committed=[1, 2], arrived=1.5, cached_tokens=4)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(past), type=Progress)
    assert again == past
