"""Where a text ends: the right token, reason and numbers, wherever in an accepted run it happens."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, Plain, TableModel, plain

PROMPT = [3, 1, 4]
COUNT = 14
END = 5


def _fresh(temperature: float) -> tuple[TableModel, SamplingParams, list[int]]:
    """A table whose plain text does not repeat itself, so that each of its tokens can be the one that stops it."""
    for seed in range(10_000):
        model = TableModel(seed, vocab_size=64)
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=COUNT)
        tokens = plain(model, PROMPT, sampling).tokens
        if len(set(tokens)) == COUNT:
            return model, sampling, tokens
    raise AssertionError("every text repeats itself")


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def text(request: pytest.FixtureRequest) -> tuple[TableModel, SamplingParams, list[int]]:
    return _fresh(request.param)


def _changed(sampling: SamplingParams, **fields: Any) -> SamplingParams:
    return msgspec.structs.replace(sampling, **fields)


def _prove_numbers(answer: Answer) -> None:
    """The statistics agree with what was streamed, and with each other."""
    statistics, emitting = answer.statistics, [delta for delta in answer.deltas if delta.tokens]
    assert statistics.completion_tokens == len(answer.tokens)
    assert statistics.steps == len(emitting)
    assert statistics.per_step_drafted == [delta.drafted for delta in emitting]
    assert statistics.per_step_accepted == [delta.accepted for delta in emitting]
    assert statistics.drafted == sum(statistics.per_step_drafted) == sum(statistics.drafted_per_depth)
    assert statistics.accepted == sum(statistics.per_step_accepted) == sum(statistics.accepted_per_depth)
    assert statistics.accepted_per_depth == sorted(statistics.accepted_per_depth, reverse=True)
    # A run is its accepted drafts and a bonus token; the last run may have been cut before that.
    missing = [delta.accepted + 1 - len(delta.tokens) for delta in emitting]
    assert missing[:-1] == [0] * len(missing[:-1])
    assert missing[-1:] in ([], [0], [1])


@pytest.mark.parametrize(
    ("how", "levels"), [("eos", 0), ("eos", 1), ("eos", 3), ("eos", 6), ("eos", 20), ("stop token", 3)]
)
def test_a_stop_token_anywhere_in_a_run(
    text: tuple[TableModel, SamplingParams, list[int]], how: str, levels: int
) -> None:
    model, sampling, tokens = text
    for position, stop in enumerate(tokens):
        harness = Harness(
            model, Guesser(model, 1.0, full=True), (1,) * levels, eos=[stop] if how == "eos" else [], max_model_len=60
        )
        params = _changed(sampling, max_tokens=50, stop_token_ids=() if how == "eos" else (stop,))
        answer = harness.answer(PROMPT, params)
        assert answer.plain == Plain(tokens[: position + 1], "stop", stop)
        _prove_numbers(answer)
        # One token comes with the prompt, then whole runs, then what is left of the last one: all of it drafted.
        whole, rest = divmod(position, levels + 1)
        assert answer.runs == [1] + [levels + 1] * whole + [rest] * (rest > 0)
        assert answer.statistics.per_step_accepted == [0] + [levels] * whole + [rest] * (rest > 0)
        assert answer.statistics.num_spec_tokens == levels


@pytest.mark.parametrize("levels", [0, 1, 3, 6, 20])
def test_max_tokens_anywhere_in_a_run(text: tuple[TableModel, SamplingParams, list[int]], levels: int) -> None:
    model, sampling, tokens = text
    for most in range(1, COUNT + 1):
        harness = Harness(model, Guesser(model, 1.0, full=True), (1,) * levels)
        answer = harness.answer(PROMPT, _changed(sampling, max_tokens=most))
        assert answer.plain == Plain(tokens[:most], "length")
        _prove_numbers(answer)
        # The last tree is cut to what can still be emitted, so its bonus token is the last token.
        whole, rest = divmod(most - 1, levels + 1)
        assert answer.statistics.per_step_accepted == [0] + [levels] * whole + [rest - 1] * (rest > 0)
        assert answer.statistics.drafted == answer.statistics.accepted


@pytest.mark.parametrize("levels", [0, 3, 20])
def test_the_models_end_anywhere_in_a_run(text: tuple[TableModel, SamplingParams, list[int]], levels: int) -> None:
    model, sampling, tokens = text
    for length in range(len(PROMPT) + 1, len(PROMPT) + COUNT + 1):
        harness = Harness(model, Guesser(model, 1.0), (2,) * levels, max_model_len=length)
        answer = harness.answer(PROMPT, _changed(sampling, max_tokens=None))
        assert answer.plain == Plain(tokens[: length - len(PROMPT)], "length")
        _prove_numbers(answer)


@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_keeps_stop_tokens_from_being_drawn(temperature: float, skill: float) -> None:
    """The ends are likely everywhere: without suppression no text would be longer than a few tokens."""
    model = TableModel(11)
    model.table[:, [END, 9]] += 4.0
    lengths = []
    for least in (0, 1, 2, 5, 6, 7, 20):
        sampling = SamplingParams(
            temperature=temperature, seed=least, max_tokens=24, min_tokens=least, stop_token_ids=(9,)
        )
        answer = Harness(model, Guesser(model, skill), (3, 2, 2, 1), eos=[END]).answer(PROMPT, sampling)
        expected = plain(model, PROMPT, sampling, [END])
        assert answer.plain == expected
        _prove_numbers(answer)
        assert not {END, 9} & set(answer.tokens[:least])
        assert len(answer.tokens) > least
        lengths.append(len(answer.tokens))
    assert min(lengths) < 5


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_a_stop_string_cuts_anywhere(text: tuple[TableModel, SamplingParams, list[int]], levels: int) -> None:
    """The server finds the end of the text in what was streamed, so it may lie runs back."""
    model, sampling, tokens = text
    for steps in (1, 2, 4):
        streamed = 1 + (steps - 1) * (levels + 1)
        for at in range(streamed + 1):
            harness = Harness(model, Guesser(model, 1.0, full=True), (1,) * levels)
            harness.add("a", PROMPT, _changed(sampling, max_tokens=40))
            for _ in range(steps):
                harness.step()
            harness.engine.finish("a", at)
            harness.engine.check()
            answer = harness.run()["a"]
            assert answer.tokens[:COUNT] == tokens[:streamed]
            last = answer.last
            assert (last.tokens, last.finish_reason, last.stop_token) == ([], "stop", None)


def test_a_stop_string_found_too_late_or_nowhere() -> None:
    harness = Harness(TableModel(13), Guesser(TableModel(13), 1.0), (1, 1), max_seqs=1, max_chunk=4)
    sampling = SamplingParams(seed=1, max_tokens=6)
    for name in ("prefilling", "waiting"):
        harness.add(name, [1] * 9, sampling)
    harness.step()
    for name in ("prefilling", "waiting"):
        harness.engine.finish(name, 3)
        harness.engine.check()
    for name, answer in harness.run().items():
        assert (answer.tokens, answer.last.finish_reason) == ([], "stop"), name
    harness.add("late", [1], sampling)
    harness.step()
    harness.engine.finish("late", 100)
    assert len(harness.run()["late"].tokens) > 0


def test_text_behind_a_cut_is_not_found_again() -> None:
    model = TableModel(14)
    harness = Harness(model, Guesser(model, 1.0, full=True), (1,) * 5, page_size=4)
    sampling = SamplingParams(seed=1, max_tokens=40)
    harness.add("a", [7] * 5, sampling)
    for _ in range(4):
        harness.step()
    tokens = harness.answers["a"].tokens
    assert len(tokens) == 19
    harness.engine.finish("a", 9)
    harness.run()
    harness.add("b", [7] * 5 + tokens, sampling)
    found = harness.run()["b"]
    assert found.statistics.cached_tokens == 12  # of the 5 + 9 tokens kept, the KV of 13 existed: three pages
    assert found.tokens == plain(model, [7] * 5 + tokens, sampling).tokens


@pytest.mark.parametrize("skill", [0.0, 0.6, 0.9])
def test_the_numbers_of_random_trees_add_up(skill: float) -> None:
    model = TableModel(15)
    rng = random.Random(15)
    for seed in range(16):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 5)))
        sampling = SamplingParams(seed=seed, max_tokens=rng.randint(1, 30), stop_token_ids=(rng.randrange(32),))
        answer = Harness(model, Guesser(model, skill, seed), shape).answer(PROMPT, sampling)
        _prove_numbers(answer)
        assert answer.statistics.num_spec_tokens == len(shape)
