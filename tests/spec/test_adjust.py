"""Bias, penalties and bans: every node of a tree has the bits of plain decoding of its path."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from foresay.spec.adjust import Adjustment, edit_logits, paths_of
from foresay.spec.sampling import SamplingParams
from tests.combinations import alternating
from tests.spec.harness import Harness
from tests.spec.laws import reference_adjust
from tests.spec.tables import Guesser, TableModel, plain
from tests.spec.trees import ancestors, random_tree

VOCAB = 32
#: Every option alone, and some together.
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 2.5, 7: -100.0, 11: 0.1}},
    "bad words": {"bad_words": ((5,), (1, 2), (9, 9), (4, 6, 8), (2, 1), (1, 1), (3, 1))},
    "phrases": {"bad_words": tuple((a, b) for a in range(VOCAB) for b in range(VOCAB) if (a + b) % 3 == 0)},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {token: (token - 10) / 3 for token in range(20)},
        "bad_words": tuple((a, b) for a in range(8) for b in range(8) if (a + b) % 3 == 0),
        "allowed_token_ids": tuple(range(24)),
    },
}


def _params(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**OPTIONS[name], **fields)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_node_has_the_bits_of_plain_decoding(name: str) -> None:
    rng = random.Random(name)
    for case in range(20):
        # Few tokens, so that they repeat in prompt, output and path.
        prompt, output = ([rng.randrange(10) for _ in range(rng.randint(low, 12))] for low in (1, 0))
        tree = random_tree(rng, rng.randint(1, 40), 10, root=[*prompt, *output][-1])
        tokens, parents = tree.tokens, tree.parents
        logits = torch.randn(len(tree), VOCAB, generator=torch.Generator().manual_seed(case)) * 3
        adjustment = Adjustment.of(_params(name), prompt, VOCAB)
        assert adjustment is not None
        for token in output:
            adjustment.count(token)
        adjusted = logits.clone()
        edit_logits(adjusted, adjustment.edits([*prompt, *output], paths_of(tokens, parents)))
        for node in range(len(tree)):
            path = [tokens[n] for n in ancestors(parents, node)[1:]]
            expected = reference_adjust(logits[node], _params(name), prompt, [*output, *path], range(VOCAB))
            assert torch.equal(adjusted[node], expected), (case, node)


def test_who_counted_a_token_leaves_no_trace() -> None:
    """A row of a tree, and the row of plain decoding after the same text: every bit, at a real vocabulary's width."""
    vocab, rng = 49_152, random.Random(1)
    sampling = SamplingParams(repetition_penalty=1.13, presence_penalty=0.37, frequency_penalty=0.29)
    prompt, path = [rng.randrange(vocab) for _ in range(300)], [rng.choice([5, 6, 7]) for _ in range(9)]
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 4
    before, after = (Adjustment(sampling, prompt, vocab) for _ in range(2))
    for token in path:
        after.count(token)
    in_a_tree, alone = row.repeat(10, 1), row.clone()
    edit_logits(in_a_tree, before.edits(prompt, [path[:depth] for depth in range(10)]))
    edit_logits(alone, after.edits([*prompt, *path], [[]]))
    assert torch.equal(in_a_tree[9], alone[0])
    assert not torch.equal(in_a_tree[8], alone[0])


def _requests(name: str) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(name)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 14]))],
            _params(
                name,
                temperature=temperature,
                seed=number,
                max_tokens=30,
                min_tokens=number % 3,
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([1.0, 0.8]),
            ),
        )
        for number, temperature in enumerate([0.0, 0.0, 0.6, 1.0])
    ]


def differing(name: str, shape: tuple[int, ...], skill: float, **options: Any) -> list[int]:
    """The numbers of the requests that a drafting engine answers otherwise than plain decoding."""
    model, requests = TableModel(1, spread=1.0), _requests(name)
    harness = Harness(model, Guesser(model, skill), shape, eos=[30], **options)
    for number, (prompt, sampling) in enumerate(requests):
        harness.add(str(number), prompt, sampling)
    answers = harness.run()
    expected = [plain(model, prompt, sampling, [30]) for prompt, sampling in requests]
    assert any(answer.statistics.accepted for answer in answers.values()) or not skill
    return [n for n, wanted in enumerate(expected) if answers[str(n)].plain != wanted]


@pytest.mark.parametrize(
    ("name", "drafted"), alternating(list(OPTIONS), [((), 0.0), ((1,) * 5, 0.9), ((4, 4), 0.0), ((3, 3, 2, 2), 0.9)])
)
def test_the_same_tokens_with_any_drafter(name: str, drafted: tuple[tuple[int, ...], float]) -> None:
    shape, skill = drafted
    assert differing(name, shape, skill) == []


@pytest.mark.parametrize("name", ["penalties", "all"])
def test_the_same_tokens_when_preempted(name: str) -> None:
    assert differing(name, (3, 2, 1), 0.9, pages=26, page_size=4, max_model_len=60) == []


@pytest.mark.parametrize("skill", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_banned_does_not_come(temperature: float, skill: float) -> None:
    model = TableModel(3, spread=1.0)
    allowed, phrase = tuple(range(6)), (2, 3)
    sampling = SamplingParams(
        temperature=temperature, seed=1, max_tokens=100, allowed_token_ids=allowed, bad_words=((4,), phrase)
    )
    free = msgspec.structs.replace(sampling, allowed_token_ids=None, bad_words=(), logit_bias={2: 3.0, 3: 3.0, 4: 3.0})
    assert {*Harness(model).answer([1, 2], free).tokens} - {*allowed}
    tokens = Harness(model, Guesser(model, skill), (3, 2, 2)).answer([1, 2], sampling).tokens
    assert set(tokens) <= {*allowed} - {4}
    assert phrase not in set(zip([2, *tokens], tokens, strict=False)), "the prompt's end counts too"


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_where_nothing_is_allowed_the_request_ends_with_the_reason(shape: tuple[int, ...]) -> None:
    model = TableModel(3)
    harness = Harness(model, Guesser(model, 1.0), shape)
    harness.add("never", [1], SamplingParams(seed=1, max_tokens=9, allowed_token_ids=(3, 4), bad_words=((3,), (4,))))
    harness.add("later", [1], SamplingParams(seed=1, max_tokens=9, allowed_token_ids=(3, 4), bad_words=((3,), (4, 4))))
    harness.add("fine", [1], SamplingParams(seed=1, max_tokens=9))
    answers = harness.run()
    reason = "no token is allowed here: allowed_token_ids together with bad_words leaves none"
    assert (answers["never"].tokens, answers["never"].last.error) == ([], reason)
    assert (answers["later"].tokens, answers["later"].last.error) == ([4], reason)
    faults = [answers[name].last.fault for name in ("never", "later")]
    assert all(fault is not None and fault[0] == ("allowed_token_ids",) for fault in faults)
    assert answers["fine"].plain == plain(model, [1], SamplingParams(seed=1, max_tokens=9))


def test_stop_tokens_that_are_all_there_is_are_an_error_before_min_tokens() -> None:
    sampling = SamplingParams(seed=1, max_tokens=9, min_tokens=3, allowed_token_ids=(3,), stop_token_ids=(3,))
    answer = Harness(TableModel(3)).answer([1], sampling)
    assert answer.last.error == "no token is allowed here: allowed_token_ids together with min_tokens leaves none"
