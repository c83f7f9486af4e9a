"""What the levels of a draft are made of: samples and children by the target's ids."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import MOST_CHILDREN
from foresay.verifier.ops.sample import best_children, sample_rows
from tests.kernels.children_cases import sampling_of

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.01},
]
TARGET = 1000


@pytest.fixture(autouse=True, params=[nullcontext, references], ids=["compiled", "reference"])
def executor(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def logits_of(rows: int, columns: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * scale


def some_ids(columns: int) -> Tensor:
    """Ids of the target in rising order, as the heads that are published have them."""
    return torch.randperm(TARGET, generator=torch.Generator().manual_seed(9))[:columns].sort().values


def widened(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The same logits where the target has them, minus infinity elsewhere."""
    wide = torch.full((len(logits), TARGET), -math.inf)
    wide[:, token_ids] = logits
    return wide


def test_a_small_vocabulary_draws_what_the_targets_would_with_the_rest_ruled_out() -> None:
    token_ids, kinds = some_ids(300), KINDS * 8
    logits, sampling = logits_of(len(kinds), 300), sampling_of(kinds)
    logits[3, 7] = math.nan
    sampled = sample_rows(logits, sampling, token_ids)
    assert sampled[3] == BROKEN and sampled.max() >= 300
    assert torch.equal(sampled, sample_rows(widened(logits, token_ids), sampling))


@pytest.mark.parametrize("count", [1, 3, MOST_CHILDREN])
def test_children_by_the_targets_ids(count) -> None:
    token_ids, kinds = some_ids(300), KINDS * 8
    logits, sampling = logits_of(len(kinds), 300), sampling_of(kinds)
    tokens, chances = best_children(logits, sampling, count, token_ids)
    wide_tokens, wide_chances = best_children(widened(logits, token_ids), sampling, count)
    assert torch.equal(tokens, wide_tokens) and torch.allclose(chances, wide_chances, atol=1e-6)
    assert torch.equal(tokens[:, 0], sample_rows(logits, sampling, token_ids)), "the best child is what is sampled here"


def test_chances_are_a_softmax_of_what_the_filters_leave() -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}]
    logits = logits_of(len(kinds), 40)
    tokens, chances = best_children(logits, sampling_of(kinds), 40)
    assert torch.allclose(chances.exp().sum(dim=-1), torch.ones(len(kinds)))
    assert (chances.diff(dim=-1).nan_to_num(nan=0.0) <= 0).all()
    weights = logits.softmax(dim=-1)
    ordered = weights.sort(dim=-1, descending=True).values
    by_p = int((ordered[2].cumsum(0) - ordered[2] < 0.5).sum())
    by_min_p = int((weights[3] >= 0.2 * weights[3].max()).sum())
    assert chances.isfinite().sum(dim=-1).tolist() == [40, 5, by_p, by_min_p, 40]
    assert (tokens[chances == -math.inf] == 0).all()
    assert set(tokens[1, :5].tolist()) == set(logits[1].topk(5).indices.tolist())
    assert tokens[4].tolist() == logits[4].argsort(descending=True).tolist(), "no noise at temperature 0"


def test_filters_that_keep_more_than_64_tokens_take_none_out() -> None:
    flat, many = {"top_p": 0.99}, {"top_k": 65}
    logits = logits_of(3, 300, scale=0.1)
    found = best_children(logits, sampling_of([flat, many, {}]), 10)
    plain = best_children(logits, sampling_of([{}, {}, {}]), 10)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


def test_ties_and_rows_of_little() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    logits = torch.zeros(4, 6)
    logits[1] = -math.inf
    logits[2, [1, 4]] = torch.tensor([math.nan, math.inf])
    logits[3, :5] = -math.inf
    tokens, chances = best_children(logits, sampling_of([greedy, {}, greedy, {"top_p": 0.9}]), 8)
    assert tokens.tolist()[0] == [0, 1, 2, 3, 4, 5, 0, 0]
    assert chances[0].tolist() == pytest.approx([-math.log(6)] * 6 + [-math.inf] * 2)
    assert (chances[1] == -math.inf).all() and (tokens[1] == 0).all()
    assert tokens.tolist()[2] == [0, 2, 3, 5, 0, 0, 0, 0] and chances[2].isfinite().sum() == 4
    assert tokens.tolist()[3] == [5, 0, 0, 0, 0, 0, 0, 0] and float(chances[3, 0]) == pytest.approx(0.0)
