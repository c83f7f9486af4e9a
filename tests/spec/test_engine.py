"""The engine around a table: the same tokens with any drafter, refusals, and errors that stay with their request."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from foresay.spec.errors import ContextLengthExceeded, InvalidRequest
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, Plain, TableModel, plain

SHAPES = {
    "chain of 1": (1,),
    "chain of 4": (1,) * 4,
    "chain of 20": (1,) * 20,
    "tree 3,2,1": (3, 2, 1),
    "tree 2,4,8,4": (2, 4, 8, 4),
    "63 below the root": (21, 21, 21),
}
SKILLS = {"garbage": 0.0, "often right": 0.8, "always right": 1.0}
END = 5


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.5, 0.7, 1.0, 1.0, 1.8]),
        top_k=rng.choice([0, 0, -1, 1, 7, 31]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        seed=rng.getrandbits(64),
        max_tokens=rng.choice([1, 2, 9, 17, 30, 40, None]),
        min_tokens=rng.choice([0, 0, 0, 1]),
        stop_token_ids=tuple(rng.sample(range(32), rng.choice([0, 0, 1]))),
        ignore_eos=rng.random() < 0.5,
    )


def _requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [([rng.randrange(32) for _ in range(rng.choice([1, 2, 5, 13, 30]))], _params(rng)) for _ in range(count)]


def _run(harness: Harness, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
    for number, (prompt, sampling) in enumerate(requests):
        harness.add(str(number), prompt, sampling)
    answers = harness.run()
    return [answers[str(number)] for number in range(len(requests))]


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_tokens_with_any_drafter(shape: str, skill: str) -> None:
    model, requests = TableModel(1), _requests(1, 7)
    harness = Harness(model, Guesser(model, SKILLS[skill]), SHAPES[shape], max_seqs=3, max_model_len=70, eos=[END])
    answers = _run(harness, requests)
    for answer, (prompt, sampling) in zip(answers, requests, strict=True):
        assert answer.plain == plain(model, prompt, sampling, [END], max_model_len=70)
    drafted, accepted = (sum(getattr(a.statistics, name) for a in answers) for name in ("drafted", "accepted"))
    assert drafted > 20
    assert accepted == sum(trace.accepted for trace in harness.traces)
    assert accepted > 20 or skill == "garbage"


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_the_same_tokens_in_many_random_engines(first: int) -> None:
    for seed in range(first, first + 6):
        rng = random.Random(1000 + seed)
        model = TableModel(seed, spread=rng.choice([0.5, 2.0, 4.0]))
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 6)))
        drafter = Guesser(model, rng.random(), seed) if rng.random() < 0.9 else None
        harness = Harness(
            model,
            drafter,
            shape,
            page_size=rng.choice([1, 3, 4, 16]),
            max_seqs=rng.randint(1, 4),
            max_model_len=72,
            prefix=rng.random() < 0.5,
            max_chunk=rng.choice([1, 5, 256]),
            eos=[END],
        )
        requests = _requests(seed, 4)
        for answer, (prompt, sampling) in zip(_run(harness, requests), requests, strict=True):
            assert answer.plain == plain(model, prompt, sampling, [END], max_model_len=72), f"harness {seed}"


def test_a_request_without_seed_gets_one_that_can_be_used_again() -> None:
    harness = Harness(TableModel(4))
    first, second = (
        harness.answer([1, 2], SamplingParams(max_tokens=30, temperature=1.8)),
        Harness(TableModel(4)).answer([1, 2], SamplingParams(max_tokens=30, temperature=1.8)),
    )
    seeds = {delta.seed for delta in first.deltas}
    assert len(seeds) == 1
    assert seeds != {second.deltas[0].seed}
    assert first.tokens != second.tokens
    again = Harness(TableModel(4)).answer([1, 2], SamplingParams(max_tokens=30, temperature=1.8, seed=seeds.pop()))
    assert again.tokens == first.tokens


@pytest.mark.parametrize(("seed", "reported"), [(0, 0), (-1, 2**64 - 1), (2**64 + 5, 5), (2**63, 2**63)])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int, reported: int) -> None:
    answer = Harness(TableModel(4)).answer([1], SamplingParams(seed=seed, max_tokens=12))
    assert {delta.seed for delta in answer.deltas} == {reported}
    assert answer.tokens == Harness(TableModel(4)).answer([1], SamplingParams(seed=reported, max_tokens=12)).tokens


@pytest.mark.parametrize(
    ("param", "prompt", "sampling"),
    [
        ("prompt", [], SamplingParams()),
        ("prompt", [3, 32], SamplingParams()),
        ("prompt", [-1, 3], SamplingParams()),
        ("temperature", [1], SamplingParams(temperature=math.nan)),
        ("top_k", [1], SamplingParams(top_k=-7)),
        ("top_p", [1], SamplingParams(top_p=0.0)),
        ("min_p", [1], SamplingParams(min_p=2.0)),
        ("max_tokens", [1], SamplingParams(max_tokens=0)),
        ("min_tokens", [1], SamplingParams(min_tokens=5, max_tokens=4)),
        ("stop_token_ids", [1], SamplingParams(stop_token_ids=(32,))),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(param: str, prompt: list[int], sampling: SamplingParams) -> None:
    harness = Harness(TableModel(5))
    with pytest.raises(InvalidRequest) as caught:
        harness.add("bad", prompt, sampling)
    assert caught.value.param == param
    assert not harness.engine.has_work
    assert harness.engine.step() == []
    harness.add("bad", [1], SamplingParams(max_tokens=3, seed=1))
    assert len(harness.run()["bad"].tokens) == 3


@pytest.mark.parametrize(
    ("param", "length", "max_tokens"),
    [("prompt", 20, None), ("prompt", 20, 1), ("prompt", 25, 3), ("max_tokens", 19, 2), ("max_tokens", 1, 20)],
)
def test_what_does_not_fit_the_model_is_refused(param: str, length: int, max_tokens: int | None) -> None:
    harness = Harness(TableModel(5), max_model_len=20)
    with pytest.raises(ContextLengthExceeded, match=f"holds 20 tokens, but the prompt has {length}") as caught:
        harness.add("long", [1] * length, SamplingParams(max_tokens=max_tokens))
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert not harness.engine.has_work


@pytest.mark.parametrize(("length", "max_tokens"), [(19, None), (19, 1), (1, 19), (1, None), (10, 10)])
def test_what_just_fits_the_model_is_served(length: int, max_tokens: int | None) -> None:
    harness = Harness(TableModel(5), Guesser(TableModel(5), 1.0), (1,) * 6, max_model_len=20)
    answer = harness.answer([1] * length, SamplingParams(max_tokens=max_tokens, seed=2))
    assert len(answer.tokens) == 20 - length
    assert answer.last.finish_reason == "length"


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    harness = Harness(TableModel(6), max_seqs=1)
    harness.add("a", [1], SamplingParams(max_tokens=2, seed=1))
    harness.add("b", [1], SamplingParams(max_tokens=2, seed=1))
    for running_or_waiting in ("a", "b"):
        with pytest.raises(InvalidRequest, match="already running") as caught:
            harness.engine.add(_request(running_or_waiting))
        assert caught.value.param == "request_id"
    harness.run()
    harness.add("a", [1], SamplingParams(max_tokens=2, seed=1))
    harness.engine.cancel("a")
    harness.engine.add(_request("a"))  # the cancelled one's last delta is still to come
    deltas = harness.step()
    assert [(delta.id, delta.finish_reason) for delta in deltas] == [("a", "cancelled"), ("a", None)]
    harness.run()


def _request(id: str) -> Request:
    return Request(id=id, prompt=[1], params=SamplingParams(max_tokens=2, seed=1))


def test_forced_draws_run_out_and_may_stop() -> None:
    model = TableModel(7)
    sampling = SamplingParams(max_tokens=12, seed=1)
    free = plain(model, [1, 2, 9, 9], sampling).tokens
    answer = Harness(model).answer([1, 2], SamplingParams(max_tokens=14, seed=1), forced=[9, 9])
    assert answer.tokens == [9, 9, *free]
    answer = Harness(model, eos=[4]).answer([1, 2], sampling, forced=[9, 4, 9])
    assert answer.plain == Plain([9, 4], "stop", 4)
    least = SamplingParams(max_tokens=12, seed=1, min_tokens=2)
    answer = Harness(model, eos=[4]).answer([1, 2], least, forced=[9, 4, 4, 9])
    assert answer.plain == Plain([9, 4, 4], "stop", 4)


def _healthy(model: TableModel, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that never come near the broken token."""
    healthy: list[tuple[list[int], SamplingParams]] = []
    seed = 0
    while len(healthy) < count:
        prompt, sampling = [seed % 29, 3], SamplingParams(seed=seed, max_tokens=20)
        if model.broken not in plain(model, prompt, sampling).tokens:
            healthy.append((prompt, sampling))
        seed += 1
    return healthy


def test_broken_logits_end_their_own_sequence_alone() -> None:
    model = TableModel(8, broken=30)
    requests = _healthy(model, 3)
    harness = Harness(model, None, eos=[])
    harness.add("sick", [4, 5], SamplingParams(max_tokens=30, seed=1), forced=[7, 8, 30, 9])
    answers = _run(harness, requests)
    for answer, (prompt, sampling) in zip(answers, requests, strict=True):
        assert answer.plain == plain(model, prompt, sampling)
    sick = harness.answers["sick"]
    assert sick.tokens == [7, 8, 30]
    assert sick.last.finish_reason == "error"
    assert "not finite" in (sick.last.error or "")
    assert sick.statistics.completion_tokens == 3


@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_broken_logits_at_a_node_that_is_not_taken_harm_nobody(skill: float) -> None:
    """A drafter may be wrong in any way: that only costs speed."""
    model = TableModel(8, broken=30)
    requests = _healthy(model, 3)
    harness = Harness(model, Guesser(model, skill, full=True), (16, 16))
    for answer, (prompt, sampling) in zip(_run(harness, requests), requests, strict=True):
        assert answer.plain == plain(model, prompt, sampling)


def test_broken_logits_come_after_the_same_tokens_with_any_drafter() -> None:
    model = TableModel(8, broken=30)
    forced, sampling = [7, 8, 9, 10, 11, 30, 9, 9], SamplingParams(max_tokens=30, seed=1)
    for levels in (0, 1, 3, 4, 5, 6):
        answer = Harness(model, Guesser(model, 1.0, full=True), (1,) * levels).answer([4, 5], sampling, forced=forced)
        assert (answer.tokens, answer.last.finish_reason) == ([7, 8, 9, 10, 11, 30], "error"), levels


def test_a_broken_prompt_is_an_error_and_nobody_finds_its_pages() -> None:
    model = TableModel(8, broken=30)
    harness = Harness(model, None, max_chunk=8)
    harness.add("sick", [1] * 20 + [30], SamplingParams(max_tokens=30, seed=1))
    sick = harness.run()["sick"]
    assert (sick.tokens, sick.last.finish_reason) == ([], "error")
    assert harness.prefix is not None
    assert len(harness.prefix) == 0


def test_what_the_observer_gets() -> None:
    model = TableModel(9)
    harness = Harness(model, Guesser(model, 1.0, full=True), (2, 1), max_chunk=6)
    first = harness.answer([1] * 10, SamplingParams(max_tokens=7, seed=1))
    assert [(t.number, t.prefill_rows, t.rows, t.drafted, t.accepted, t.emitted) for t in harness.traces] == [
        (1, 6, 6, 0, 0, 0),
        (2, 3, 4, 0, 0, 1),
        (3, 0, 4, 3, 2, 3),
        (4, 0, 4, 3, 2, 3),
    ]
    assert [list(trace.reading.values()) for trace in harness.traces] == [[(6, 0)], [], [], []]
    assert first.runs == [1, 3, 3]
    assert {trace.sequences for trace in harness.traces} == {1}
    assert set(harness.traces[2].seconds) == {"plan", "propose", "forward", "draw", "commit"}
    assert set(first.statistics.seconds) == {"queue", "prefill", "plan", "propose", "forward", "draw", "commit"}
