"""Forks: choices that share the KV of one prompt emit what separate requests would, whatever becomes of the leader."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foresay.spec.errors import InvalidRequest
from foresay.spec.sampling import SamplingParams
from tests.combinations import pairwise
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel, plain

PROMPT = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def _sampling(seed: int, max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **fields)


def _add(harness: Harness, count: int, prompt: list[int], max_tokens: int = 12, leader: str = "0") -> None:
    """Choice 0 leads; the others follow it."""
    for number in range(count):
        harness.add(str(number), prompt, _sampling(number, max_tokens), fork_of=leader if number else None)


def _prove(harness: Harness, prompt: list[int], max_tokens: int = 12) -> None:
    for name, answer in harness.run().items():
        assert answer.plain == plain(harness.model, prompt, _sampling(int(name), max_tokens)), name


def _prompt_rows(harness: Harness) -> int:
    return sum(trace.prefill_rows for trace in harness.traces)


@pytest.mark.parametrize(("length", "prefix", "max_seqs"), pairwise([1, 2, 4, 5, 8, 9, 12], [True, False], [1, 2, 5]))
def test_the_prompt_is_computed_once(length: int, prefix: bool, max_seqs: int) -> None:
    """Lengths on both sides of a page border, choices that run at once or one after the other."""
    model = TableModel(1)
    harness = Harness(model, Guesser(model, 0.8), (2, 2, 1), prefix=prefix, max_seqs=max_seqs, page_size=4)
    _add(harness, 5, PROMPT[:length])
    _prove(harness, PROMPT[:length])
    assert _prompt_rows(harness) == length - 1


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_forks_wait_outside_the_queue_while_the_prompt_is_computed(chunk: int) -> None:
    harness = Harness(TableModel(2), max_chunk=chunk, max_seqs=3)
    _add(harness, 3, PROMPT)
    harness.add("9", PROMPT, _sampling(9))
    harness.step()
    assert [sequence.id for sequence in harness.scheduler.running][:1] == ["0"]
    if chunk == 1:
        assert [sequence.id for sequence in harness.scheduler.forks] == ["1", "2"]
        assert "9" in [sequence.id for sequence in harness.scheduler.running], "nobody waits for the forks"
    _prove(harness, PROMPT)


def test_a_fork_of_one_who_runs_already_starts_at_once() -> None:
    harness = Harness(TableModel(2), Guesser(TableModel(2), 1.0), (1, 1), prefix=False)
    harness.add("0", PROMPT, _sampling(0, 30))
    for _ in range(4):
        harness.step()
    harness.add("1", PROMPT, _sampling(1), fork_of="0")
    harness.add("2", PROMPT, _sampling(2), fork_of="1")
    harness.engine.check()
    answers = harness.run()
    assert _prompt_rows(harness) == len(PROMPT) - 1
    for name, most in (("0", 30), ("1", 12), ("2", 12)):
        assert answers[name].plain == plain(harness.model, PROMPT, _sampling(int(name), most))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_leader_that_ends_with_its_first_tokens(max_tokens: int) -> None:
    harness = Harness(TableModel(3), prefix=False)
    _add(harness, 4, PROMPT, max_tokens)
    _prove(harness, PROMPT, max_tokens)
    assert _prompt_rows(harness) == len(PROMPT) - 1


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("how", ["cancel", "finish"])
@pytest.mark.parametrize("who", ["0", "1"])
def test_when_one_leaves_the_others_go_on(who: str, how: str, steps: int) -> None:
    model = TableModel(4)
    harness = Harness(model, Guesser(model, 0.7), (2, 1), max_chunk=4, max_seqs=2, prefix=False)
    _add(harness, 4, PROMPT)
    for _ in range(steps):
        harness.step()
    if how == "cancel":
        harness.engine.cancel(who)
    else:
        harness.engine.finish(who, 0)
    harness.engine.check()
    answers = harness.run()
    for name in {"0", "1", "2", "3"} - {who}:
        assert answers[name].plain == plain(model, PROMPT, _sampling(int(name)))
    assert answers[who].last.finish_reason == {"cancel": "cancelled", "finish": "stop"}[how]


def test_a_leader_nobody_knows_is_none() -> None:
    harness = Harness(TableModel(5))
    harness.add("1", PROMPT, _sampling(1), fork_of="0")
    assert harness.run()["1"].plain == plain(harness.model, PROMPT, _sampling(1))


@pytest.mark.parametrize(("prompt", "salt"), [(PROMPT[:-1], ""), (PROMPT, "other")])
def test_a_leader_with_another_prompt_is_refused(prompt: list[int], salt: str) -> None:
    harness = Harness(TableModel(5))
    harness.add("0", PROMPT, _sampling(0))
    with pytest.raises(InvalidRequest, match="another prompt") as caught:
        harness.add("1", prompt, _sampling(1), salt, fork_of="0")
    assert caught.value.param == "fork_of"
    assert list(harness.run()) == ["0"]


def test_a_leader_whose_logits_break() -> None:
    model = TableModel(8, broken=30)
    harness = Harness(model)
    harness.add("0", [1] * 9 + [30], _sampling(0))
    harness.add("1", [1] * 9 + [30], _sampling(1), fork_of="0")
    answers = harness.run()
    assert [answer.last.finish_reason for answer in answers.values()] == ["error", "error"]


def test_choices_draw_their_first_token_themselves_and_score_no_prompt() -> None:
    harness = Harness(TableModel(6), max_seqs=8)
    for number in range(8):
        sampling = _sampling(number, 3, prompt_logprobs=1, logprobs=1)
        harness.add(str(number), PROMPT, sampling, fork_of="0" if number else None)
    answers = harness.run()
    assert len({answer.tokens[0] for answer in answers.values()}) > 3
    assert [name for name, answer in answers.items() if answer.deltas[0].prompt_logprobs is not None] == ["0"]
    assert all(len(answer.logprobs) == 3 for answer in answers.values())


def test_a_prefix_found_by_the_leader_is_shared_and_counted_once_each() -> None:
    harness = Harness(TableModel(7), page_size=4)
    harness.add("first", PROMPT, _sampling(1))
    harness.run()
    _add(harness, 3, PROMPT)
    answers = harness.run()
    assert [answers[name].statistics.cached_tokens for name in "012"] == [8, 8, 8]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("skill", [0.0, 0.9])
def test_too_few_pages(skill: float, prefix: bool) -> None:
    """Six choices that need 12 pages each, in a pool of 26: some are preempted, some lose their share."""
    model = TableModel(9)
    harness = Harness(
        model, Guesser(model, skill), (3, 2), pages=27, page_size=4, max_seqs=4, max_model_len=80, prefix=prefix
    )
    _add(harness, 6, PROMPT, 34)
    _prove(harness, PROMPT, 34)
    assert sum(answer.statistics.ending.preemptions for answer in harness.answers.values()) > 0


def test_a_queue_of_forks_gives_its_pages_to_one_who_runs() -> None:
    """One slot, so the forks wait with the prompt in hand; the leader needs nearly all pages before they begin."""
    model = TableModel(9)
    harness = Harness(model, None, pages=24, page_size=4, max_seqs=1, max_model_len=80, prefix=False)
    harness.add("0", PROMPT * 3, _sampling(0, 3))
    harness.add("1", PROMPT * 3, _sampling(1, 3), fork_of="0")
    harness.add("big", [5] * 60, _sampling(5, 20))
    harness.step()
    assert [bool(sequence.table.pages) for sequence in harness.scheduler.waiting] == [True, False]
    # The fork has to wait longer than it would: one who came later runs out of pages first.
    harness.scheduler.waiting.rotate(1)
    answers = harness.run()
    for name, prompt, most in (("0", PROMPT * 3, 3), ("1", PROMPT * 3, 3), ("big", [5] * 60, 20)):
        assert answers[name].plain == plain(model, prompt, _sampling(int(name) if name != "big" else 5, most)), name


def test_random_choices_in_random_engines() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        model = TableModel(seed)
        harness = Harness(
            model,
            Guesser(model, rng.random(), seed),
            tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3))),
            pages=rng.choice([32, 60, 200]),
            page_size=rng.choice([3, 4]),
            max_seqs=rng.randint(1, 5),
            max_chunk=rng.choice([2, 5, 256]),
            prefix=rng.random() < 0.5,
            max_model_len=60,
        )
        requests: dict[str, tuple[list[int], SamplingParams]] = {}
        left = [(family, number) for family in range(4) for number in range(4)]
        prompts = [[rng.randrange(32) for _ in range(rng.randint(1, 20))] for _ in range(4)]
        while left or harness.engine.has_work:
            if left and rng.random() < 0.6:
                family, number = left.pop(0)
                name = f"{family}-{number}"
                requests[name] = prompts[family], _sampling(100 * family + number, rng.choice([1, 5, 30]))
                harness.add(name, *requests[name], fork_of=f"{family}-0" if number else None)
            if requests and rng.random() < 0.1:
                harness.engine.cancel(rng.choice(sorted(requests)))
            harness.step()
        harness.run()
        for name, (prompt, sampling) in requests.items():
            answer = harness.answers[name]
            expected = plain(model, prompt, sampling)
            if answer.last.finish_reason == "cancelled":
                assert answer.tokens == expected.tokens[: len(answer.tokens)]
            else:
                assert answer.plain == expected, (seed, name)
