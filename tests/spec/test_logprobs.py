"""Log-probabilities: of the right row, with the same bits under any drafter, for output and prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.spec.logits import IMPOSSIBLE, logprobs_of
from foresay.spec.request import TokenLogprobs
from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, TableModel, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def teacher_forced(model: TableModel, text: Sequence[int], start: int, count: int) -> list[TokenLogprobs]:
    """Entries of the tokens from ``start`` on, each row looked up alone."""
    return [
        logprobs_of(
            model.logits([model.state(text[:position])], text[position - 1 : position]), [text[position]], count
        )[0]
        for position in range(start, len(text))
    ]


def test_against_float64() -> None:
    rows = torch.randn(5, 49_152, generator=torch.Generator().manual_seed(0)) * 5
    tokens = [int(row.argmax()) for row in rows[:2]] + [7, 8, 9]
    expected = rows.double().log_softmax(-1)
    for entry, row, token in zip(logprobs_of(rows, tokens, 20), expected, tokens, strict=True):
        values, ids = row.topk(20)
        assert (entry.token, [token for token, _ in entry.top]) == (token, ids.tolist())
        torch.testing.assert_close(
            torch.tensor([entry.logprob, *(logprob for _, logprob in entry.top)]),
            torch.cat((row[token][None], values)).float(),
            rtol=0,
            atol=2e-6,
        )
        assert entry.logprob <= 0.0


def test_literal_values_ties_and_what_json_cannot_say() -> None:
    row = torch.tensor([[0.0, -torch.inf, 1.0, 1.0, 0.0, 1.0]])
    (entry,) = logprobs_of(row, [1], 4)
    assert (entry.logprob, [token for token, _ in entry.top]) == (IMPOSSIBLE, [2, 3, 5, 0])
    (flat,) = logprobs_of(torch.zeros(1, 4), [2], 0)
    assert (flat.token, flat.top) == (2, [])
    assert flat.logprob == pytest.approx(-1.3862944)
    assert len(logprobs_of(torch.zeros(1, 4), [2], 20)[0].top) == 4


def test_a_row_has_the_same_bits_in_any_company() -> None:
    rows = torch.randn(9, 50_001, generator=torch.Generator().manual_seed(1))
    together = logprobs_of(rows, range(9), 5)
    for index in range(9):
        assert logprobs_of(rows[index : index + 1].clone(), [index], 5) == [together[index]]
        assert logprobs_of(rows[index:], range(index, 9), 5)[0] == together[index]


@pytest.mark.parametrize(("shape", "skill"), [((), 0.0), ((1,) * 6, 1.0), ((4, 3, 3, 1), 0.8), ((8, 8), 0.0)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_entries_are_those_of_the_final_text(temperature: float, shape: tuple[int, ...], skill: float) -> None:
    model = TableModel(1)
    harness = Harness(model, Guesser(model, skill), shape, eos=[30])
    for number in range(6):
        extra: dict[str, Any] = {"presence_penalty": 1.5, "logit_bias": {4: 5.0}} if number % 2 else {}
        sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=20, logprobs=number, **extra)
        harness.add(str(number), PROMPT[number:], sampling)
    harness.add("none", PROMPT, SamplingParams(seed=1, max_tokens=5))
    answers = harness.run()
    assert all(delta.logprobs is None for delta in answers.pop("none").deltas)
    for name, answer in answers.items():
        prompt = PROMPT[int(name) :]
        assert answer.logprobs == teacher_forced(model, [*prompt, *answer.tokens], len(prompt), int(name))


def _scored(answer: Answer) -> list[TokenLogprobs | None]:
    """The prompt's entries, which come once, with the first token."""
    found = [delta.prompt_logprobs for delta in answer.deltas if delta.prompt_logprobs is not None]
    assert len(found) == 1
    assert answer.deltas[0].prompt_logprobs is found[0]
    assert answer.deltas[0].tokens
    return found[0]


@pytest.mark.parametrize("max_tokens", [1, 7])
@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_prompt_logprobs(length: int, chunk: int, max_tokens: int) -> None:
    model, prompt = TableModel(2), PROMPT[:length]
    harness = Harness(model, Guesser(model, 0.8), (2, 2), max_chunk=chunk)
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, prompt_logprobs=3)
    for name in ("first", "again"):  # the second would find the prompt's pages
        harness.add(name, prompt, sampling)
        answer = harness.run()[name]
        assert _scored(answer) == [None, *teacher_forced(model, prompt, 1, 3)]
        assert answer.plain == plain(model, prompt, sampling)
        assert answer.statistics.cached_tokens == 0


def test_prompt_logprobs_in_company_and_when_preempted() -> None:
    """Some entries are there already when the prompt is computed again."""
    model = TableModel(3)
    harness = Harness(
        model, Guesser(model, 0.7), (2, 2), pages=30, page_size=4, max_seqs=5, max_chunk=5, max_model_len=90
    )
    rng, prompts = random.Random(1), {}
    for number in range(8):
        prompts[str(number)] = prompt = [rng.randrange(32) for _ in range(25)]
        count = number % 3 if number % 4 else None
        harness.add(str(number), prompt, SamplingParams(seed=number, max_tokens=40, prompt_logprobs=count, logprobs=1))
    answers = harness.run()
    assert sum(answer.statistics.ending.preemptions for answer in answers.values()) > 0
    for name, prompt in prompts.items():
        number, answer = int(name), answers[name]
        assert answer.logprobs == teacher_forced(model, [*prompt, *answer.tokens], 25, 1)
        if number % 4:
            assert _scored(answer) == [None, *teacher_forced(model, prompt, 1, number % 3)]
        else:
            assert all(delta.prompt_logprobs is None for delta in answer.deltas)
