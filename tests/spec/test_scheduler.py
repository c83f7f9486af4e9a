"""Who runs when: admission, chunked prefill, pages running out, prefixes found again, and requests that go away."""

from __future__ import annotations

import random

import msgspec
import pytest

from foresay.spec.budget import CostModel
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import MAX_NODES
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel, plain

COST = CostModel([1, 4, 8, 32, 64, 256], [1.0, 1.0, 1.2, 2.0, 3.0, 9.0])


def _sampling(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens)


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32) for _ in range(length)]


def _running(harness: Harness) -> list[str]:
    return [sequence.id for sequence in harness.scheduler.running]


def _waiting(harness: Harness) -> list[str]:
    return [sequence.id for sequence in harness.scheduler.waiting]


def test_requests_start_in_the_order_they_came() -> None:
    harness = Harness(TableModel(1), max_seqs=2)
    for name, length in zip("abcde", (3, 1, 2, 5, 1), strict=True):
        harness.add(name, [1, 2], _sampling(1, length))
    seen = []
    while harness.engine.has_work:
        seen.append((_running(harness), _waiting(harness)))
        harness.step()
    assert seen == [
        ([], ["a", "b", "c", "d", "e"]),
        (["a"], ["c", "d", "e"]),
        (["a", "c"], ["d", "e"]),
        ([], ["d", "e"]),
        (["d"], []),
        (["d"], []),
        (["d"], []),
        (["d"], []),
    ]
    assert [name for name, answer in harness.answers.items() if answer.last.finish_reason == "length"] == list("abcde")


def test_one_who_does_not_fit_is_not_overtaken() -> None:
    """Five pages are free: b needs six, and c, which would fit, waits behind it."""
    harness = Harness(TableModel(1), pages=13, page_size=4, max_model_len=40)
    harness.add("a", _prompt(1, 27), _sampling(1, 3))
    harness.step()
    harness.add("b", _prompt(2, 22), _sampling(1, 3))
    harness.add("c", _prompt(3, 2), _sampling(1, 3))
    harness.step()
    assert (_running(harness), _waiting(harness)) == (["a"], ["b", "c"])
    harness.step()
    harness.step()
    assert _running(harness) == ["b", "c"]
    harness.run()


def test_pages_promised_to_one_are_not_given_to_the_next() -> None:
    """Ten pages each, 16 in the pool: both would be let in while neither has taken its pages, and one thrown out."""
    harness = Harness(TableModel(1), pages=17, page_size=4, max_model_len=60, max_chunk=8)
    for name in "ab":
        harness.add(name, _prompt(ord(name), 38), _sampling(1, 3))
    harness.step()
    assert (_running(harness), _waiting(harness)) == (["a"], ["b"])
    answers = harness.run()
    assert [answer.statistics.ending.preemptions for answer in answers.values()] == [0, 0]


def test_a_prompt_alone_comes_in_chunks_of_the_largest_size() -> None:
    harness = Harness(TableModel(2), max_chunk=8)
    harness.add("a", _prompt(1, 30), _sampling(1, 2))
    harness.run()
    parts = [[(len(part.tokens), part.base, part.logits) for part in rows] for rows in harness.verifier.passes]
    # 29 tokens before the root, which rides along with the last chunk.
    assert parts == [[(8, 0, "none")], [(8, 8, "none")], [(8, 16, "none")], [(6, 24, "last")], [(1, 30, "all")]]


def test_the_oldest_prompt_goes_first_and_the_next_takes_what_is_left() -> None:
    harness = Harness(TableModel(2), max_chunk=8)
    harness.add("a", _prompt(1, 11), _sampling(1, 2))
    harness.add("b", _prompt(2, 11), _sampling(1, 2))
    harness.run()
    parts = [[(len(part.tokens), part.logits) for part in rows] for rows in harness.verifier.passes]
    # b joins a's last chunk, then a decodes while b's prompt is finished; one row of the eight is never a root.
    assert parts == [[(8, "none")], [(3, "last"), (6, "none")], [(1, "all"), (5, "last")], [(1, "all")]]


@pytest.mark.parametrize("shape", [(), (1,) * 4, (3, 2, 1), (8, 8)])
def test_a_mixed_step_has_no_more_prefill_rows_than_the_cost_allows(shape: tuple[int, ...]) -> None:
    model = TableModel(3)
    harness = Harness(model, Guesser(model, 0.5, full=True), shape, cost=COST, max_seqs=6, max_chunk=100)
    for number in range(12):
        harness.add(str(number), _prompt(number, 20 + 5 * number), _sampling(number, 3 + 4 * number))
    mixed = 0
    while harness.engine.has_work:
        harness.step()
        rows = harness.verifier.passes[-1]
        decoding = sum(len(part.tokens) for part in rows if part.logits == "all")
        prefill = sum(len(part.tokens) - (part.logits == "last") for part in rows if part.logits != "all")
        assert prefill == harness.traces[-1].prefill_rows
        assert prefill <= harness.scheduler.chunk(decoding, 100)
        assert (
            not (prefill and decoding) or prefill == 1 or COST.seconds(decoding + prefill) <= 2 * COST.seconds(decoding)
        )
        mixed += bool(prefill and decoding)
    assert mixed >= 5
    for number in range(12):
        expected = plain(model, _prompt(number, 20 + 5 * number), _sampling(number, 3 + 4 * number))
        assert harness.answers[str(number)].plain == expected


def test_a_prediction_next_to_a_prompt_makes_nothing_wait_longer() -> None:
    """Room for 32 drafts is no reason to read more of the prompt: how many there will be is not known yet."""
    read = []
    for prediction in (None, [1, 2, 3] * 20):
        harness = Harness(TableModel(3), None, (1, 1), cost=COST, max_chunk=100)
        harness.add("decoding", [1, 2], _sampling(1, 40), prediction=prediction)
        harness.step()
        harness.add("prompt", _prompt(2, 60), _sampling(2, 4))
        harness.step()
        read.append(harness.traces[-1].prefill_rows)
    assert 0 < read[0] == read[1] < 59


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("skill", "shape"), [(0.0, ()), (0.7, (1, 1, 1)), (0.9, (4, 4, 2))])
def test_preemption_changes_no_token(skill: float, shape: tuple[int, ...], prefix: bool) -> None:
    """Five sequences that would need 80 pages share 25."""
    model = TableModel(4)
    drafter = Guesser(model, skill)
    harness = Harness(
        model, drafter, shape, pages=26, page_size=4, max_seqs=5, max_model_len=70, prefix=prefix, max_chunk=16
    )
    for number in range(5):
        harness.add(str(number), _prompt(number, 20 + number), _sampling(number, 40))
    answers = harness.run()
    for number in range(5):
        assert answers[str(number)].plain == plain(model, _prompt(number, 20 + number), _sampling(number, 40))
    preemptions = [answers[str(number)].statistics.ending.preemptions for number in range(5)]
    assert sum(preemptions) >= 3
    assert preemptions[0] == 0, "the oldest is never sent away"
    assert sorted(drafter.over) == sorted(str(number) for number in range(5) for _ in range(preemptions[number] + 1))


def test_the_youngest_goes_first_and_comes_back_first() -> None:
    model = TableModel(4)
    harness = Harness(model, None, pages=13, page_size=4, max_seqs=3, max_model_len=48, prefix=False)
    for name in "abc":
        harness.add(name, _prompt(ord(name), 12), _sampling(1, 30))
    harness.add("d", [1], _sampling(1, 1))
    order = []
    while harness.engine.has_work:
        harness.step()
        order.append("".join(_running(harness)) + "|" + "".join(_waiting(harness)))
    changes = [now for before, now in zip(["", *order], order, strict=False) if now != before]
    # c is sent away twice, b once, and each comes back before d, which needs one step and is never in front of them.
    assert changes == ["abc|d", "ab|cd", "a|bcd", "|bcd", "bc|d", "b|cd", "|cd", "c|", "|"]
    assert harness.answers["a"].statistics.ending.preemptions == 0


def test_a_tree_gives_way_before_a_neighbour_does() -> None:
    """Both fit with a root-only tree, not with 20 nodes each."""
    model = TableModel(5)
    harness = Harness(
        model, Guesser(model, 1.0, full=True), (19,), pages=12, page_size=4, max_model_len=24, prefix=False
    )
    for name in "ab":
        harness.add(name, [1, ord(name) - 90], _sampling(1, 12))
    answers = harness.run()
    for name in "ab":
        assert answers[name].plain == plain(model, [1, ord(name) - 90], _sampling(1, 12))
        assert answers[name].statistics.ending.preemptions == 0
    sizes = {len(part.tokens) for rows in harness.verifier.passes for part in rows if part.logits == "all"}
    assert sizes == {1, 20}


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_longest_sequence_fits_the_pool_alone(page_size: int) -> None:
    model = TableModel(6)
    harness = Harness(
        model, Guesser(model, 0.9, full=True), (21, 21, 21), pages=1 + 128 // page_size, page_size=page_size
    )
    harness.engine.info = msgspec.structs.replace(harness.engine.info, max_model_len=128 - MAX_NODES)
    sampling = SamplingParams(seed=1)
    answer = harness.answer([1, 2], sampling)
    assert answer.plain == plain(model, [1, 2], sampling, max_model_len=64)
    assert answer.statistics.ending.preemptions == 0


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    model = TableModel(7)
    harness = Harness(model, Guesser(model, 0.8), (2, 1), page_size=4)
    prompt, sampling = _prompt(1, 30), _sampling(1, 10)
    expected = plain(model, prompt, sampling)

    def ask(prompt: list[int], salt: str = "") -> tuple[list[int], int, int]:
        before = len(harness.traces)
        answer = harness.answer(prompt, sampling, salt)
        assert {delta.cached_tokens for delta in answer.deltas} == {answer.statistics.cached_tokens}
        return answer.tokens, answer.statistics.cached_tokens, sum(t.prefill_rows for t in harness.traces[before:])

    assert ask(prompt) == (expected.tokens, 0, 29)
    assert ask(prompt) == (expected.tokens, 28, 1)
    assert ask(prompt, "another tenant") == (expected.tokens, 0, 29)
    assert ask(prompt, "another tenant") == (expected.tokens, 28, 1)
    # The next turn of a conversation: prompt and answer are both known, but for the last token's KV.
    turn = prompt + expected.tokens + [1, 2, 3]
    assert ask(turn)[1:] == (36, 6)
    # Pages count from the start: the same 24 tokens, then others.
    assert ask([*prompt[:25], 0, 0])[1:] == (24, 2)
    assert ask([9, *prompt])[1:] == (0, 30)


def test_a_prompt_of_whole_pages_keeps_its_root() -> None:
    model = TableModel(7)
    harness = Harness(model, None, page_size=4)
    prompt = _prompt(1, 16)
    for cached in (0, 12):
        answer = harness.answer(prompt, _sampling(1, 3))
        assert answer.plain == plain(model, prompt, _sampling(1, 3))
        assert answer.statistics.cached_tokens == cached


def test_running_sequences_share_a_prompt() -> None:
    model = TableModel(8)
    harness = Harness(model, Guesser(model, 0.8), (3, 2), page_size=4, max_seqs=4)
    prompt = _prompt(1, 33)
    harness.add("0", prompt, _sampling(0, 20))
    harness.step()
    for number in (1, 2, 3):
        harness.add(str(number), prompt, _sampling(number, 20))
    harness.step()
    tables = [sequence.table for sequence in harness.scheduler.running]
    assert {tuple(table.pages[:8]) for table in tables} == {tuple(tables[0].pages[:8])}
    for name, answer in harness.run().items():
        assert answer.plain == plain(model, prompt, _sampling(int(name), 20))
        assert answer.statistics.cached_tokens == (32 if name != "0" else 0)


def test_cancelling_at_any_stage() -> None:
    model = TableModel(9)
    drafter = Guesser(model, 0.8)
    harness = Harness(model, drafter, (2, 2), max_seqs=2, max_chunk=6)
    for name in ("decoding", "prefilling", "waiting", "never"):
        harness.add(name, [1] if name == "decoding" else _prompt(1, 25), _sampling(1, 30))
    harness.engine.cancel("never")
    for _ in range(3):
        harness.step()
    assert (_running(harness), _waiting(harness)) == (["decoding", "prefilling"], ["waiting"])
    streamed = harness.answers["decoding"].tokens
    for name in ("decoding", "prefilling", "waiting"):
        harness.engine.cancel(name)
        harness.engine.cancel(name)
        harness.engine.check()
    assert harness.engine.has_work  # the last deltas are still to be sent
    passes = len(harness.verifier.passes)
    answers = harness.run()
    assert len(harness.verifier.passes) == passes
    for name, answer in answers.items():
        assert answer.last.finish_reason == "cancelled", name
        assert answer.tokens == (streamed if name == "decoding" else [])
        assert answer.statistics.completion_tokens == len(answer.tokens)
    assert sorted(drafter.over) == sorted(answers)


def test_cancelling_a_preempted_sequence() -> None:
    harness = Harness(TableModel(4), None, pages=13, page_size=4, max_seqs=3, max_model_len=48)
    for name in "abc":
        harness.add(name, _prompt(ord(name), 12), _sampling(1, 30))
    while not harness.scheduler.preempted:
        harness.step()
    (preempted,) = harness.scheduler.preempted
    assert preempted.id == "c"
    harness.engine.cancel("c")
    harness.engine.check()
    answers = harness.run()
    assert answers["c"].last.finish_reason == "cancelled"
    for name in "ab":
        assert answers[name].plain == plain(TableModel(4), _prompt(ord(name), 12), _sampling(1, 30))


def test_200_requests_that_come_and_go() -> None:
    """Some are cancelled, some cut by a stop string, some end by themselves; a small pool, shared beginnings."""
    rng = random.Random(200)
    model = TableModel(10)
    harness = Harness(model, Guesser(model, 0.8), (3, 2, 1), pages=40, max_seqs=4, max_model_len=60, cost=COST, eos=[7])
    beginnings = [_prompt(seed, 14) for seed in range(3)]
    prompts, alive, seen = {}, set(), dict.fromkeys(("cancelled", "stop", "length"), 0)
    while len(prompts) < 200 or harness.engine.has_work:
        if len(prompts) < 200 and rng.random() < 0.7:
            name = str(len(prompts))
            prompts[name] = rng.choice(beginnings)[: rng.randint(1, 14)] + _prompt(len(prompts), rng.randint(0, 12))
            harness.add(name, prompts[name], _sampling(len(prompts), rng.randint(1, 25)), salt=rng.choice(["", "b"]))
            alive.add(name)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            name = rng.choice(sorted(alive or {"nobody"}))
            if rng.random() < 0.7:
                harness.engine.cancel(name)
            else:
                harness.engine.finish(name, rng.randint(0, 20))
            harness.engine.check()
        alive -= {delta.id for delta in harness.step() if delta.finish_reason}
    harness.run()
    for number, (name, prompt) in enumerate(prompts.items(), start=1):
        answer = harness.answers[name]
        seen[str(answer.last.finish_reason)] += 1
        expected = plain(model, prompt, _sampling(number, 25), [7]).tokens
        assert answer.tokens == expected[: len(answer.tokens)], name
    assert min(seen.values()) >= 15, seen
    assert harness.prefix is not None
    harness.pool.evict(harness.pool.num_pages)
    assert len(harness.prefix) == 0
    assert harness.pool.available == harness.pool.num_pages - 1
