"""What every kernel that finds children is held to: the torch code's children, in its order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import MOST_CHILDREN, RowSampling
from foresay.verifier.ops.sample import best_children as reference

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": MOST_CHILDREN},
    {"top_k": MOST_CHILDREN + 1},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]

#: As the op, its columns of tokens last.
Find = Callable[..., tuple[Tensor, Tensor]]


def sampling_of(kinds: list[dict[str, Any]]) -> RowSampling:
    rng = random.Random(1)
    positions = [rng.randrange(1 << 17) for _ in kinds]
    return RowSampling.from_params(
        [SamplingParams(**kind) for kind in kinds], [rng.getrandbits(64) for _ in kinds], positions
    )


def assert_found_alike(
    find: Find, logits: Tensor, kinds: list[dict[str, Any]], count: int, token_ids: Tensor | None = None
) -> Tensor:
    tokens, chances = find(logits, sampling_of(kinds), count, token_ids)
    with references():
        wanted_tokens, wanted_chances = reference(logits, sampling_of(kinds), count, token_ids)
    assert torch.equal(tokens, wanted_tokens)
    torch.testing.assert_close(chances, wanted_chances, rtol=1e-5, atol=1e-5)
    return chances


def part_of(sampling: RowSampling, rows: slice) -> RowSampling:
    s = sampling
    return RowSampling(*(t[rows] for t in (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)))


def rows_of(scales: list[float], width: int) -> Tensor:
    """fp32[N, V] of normal logits, one row of each scale: from flat to peaked."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(len(scales), width, generator=generator) * torch.tensor(scales)[:, None]


class ChildrenCases:
    """Who inherits them has fixtures: ``find``, and ``small_pieces``, many of a row though the vocabulary is small."""

    @pytest.mark.parametrize("count", [1, 7, MOST_CHILDREN])
    @pytest.mark.usefixtures("small_pieces")
    def test_every_kind_of_row(self, count, find) -> None:
        chances = assert_found_alike(find, rows_of([0.2, 2.0, 4.0] * (len(KINDS) // 3), 150), KINDS, count)
        assert count < MOST_CHILDREN or (chances == -math.inf).any(), "some filters leave fewer"

    @pytest.mark.parametrize("width", [1, 2, 64, 65, 200])
    @pytest.mark.usefixtures("small_pieces")
    def test_any_vocabulary(self, width, find) -> None:
        kinds = KINDS[::3]
        assert_found_alike(find, rows_of([2.0] * len(kinds), width), kinds, 5)

    @pytest.mark.usefixtures("small_pieces")
    def test_columns_that_are_other_tokens_of_the_target(self, find) -> None:
        token_ids = torch.randperm(152_000, generator=torch.Generator().manual_seed(2))[:200]
        kinds = KINDS[1::2]
        assert_found_alike(find, rows_of([2.0] * len(kinds), 200), kinds, 6, token_ids)

    @pytest.mark.parametrize(
        ("kind", "kept", "left"),
        [({"min_p": 0.3}, 63, 63), ({"min_p": 0.3}, 64, 200), ({"top_k": 64}, 99, 64), ({"top_k": 65}, 9, 200)],
        ids=str,
    )
    @pytest.mark.usefixtures("small_pieces")
    def test_filters_that_keep_about_as_much_as_a_list_holds(self, kind, kept, left, find) -> None:
        logits = rows_of([0.1], 200)
        logits[:, :kept] += 3.0
        chances = assert_found_alike(find, logits, [kind], MOST_CHILDREN)
        total = float(chances.exp().sum())
        assert chances.isfinite().sum() == min(left, MOST_CHILDREN)
        assert (abs(total - 1) < 1e-4) == (left <= MOST_CHILDREN), "they are a part of what is left"

    @pytest.mark.usefixtures("small_pieces")
    def test_the_likeliest_all_in_one_block(self, find) -> None:
        kinds = KINDS[2::3]
        logits = rows_of([1.0] * len(kinds), 200)
        logits[:, 64:128] += 12
        assert_found_alike(find, logits, kinds, 10)

    @pytest.mark.usefixtures("small_pieces")
    def test_ties_go_to_the_first_column(self, find) -> None:
        logits = (rows_of([1.0] * len(KINDS), 200) * 2).round()
        logits[0] = -logits[0].abs()
        logits[0, ::3] *= -1.0  # zeros of both signs
        logits[0] = logits[0].clamp(max=0.0)
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}] * 3 + [{"top_k": 3}, {"top_k": 5, "min_p": 0.5}]
        assert_found_alike(find, logits[: len(kinds)], kinds, MOST_CHILDREN)

    @pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
    @pytest.mark.usefixtures("small_pieces")
    def test_rows_of_little(self, kind, find) -> None:
        logits = rows_of([1.0] * 5, 300)
        logits[0, 299] = math.nan
        logits[1, 5] = math.inf
        logits[2] = -math.inf
        logits[3, :290] = -math.inf
        logits[4] = math.nan
        chances = assert_found_alike(find, logits, [kind] * 5, 12)
        assert (chances[[2, 4]] == -math.inf).all() and chances[[0, 1, 3], 0].isfinite().all()

    def test_a_whole_vocabulary_of_a_real_size(self, find) -> None:
        assert_found_alike(find, rows_of([3.0, 3.0], 151_936), [{"top_k": 5, "top_p": 0.95}, {}], 2)

    @pytest.mark.usefixtures("small_pieces")
    def test_a_row_is_alike_alone_and_in_company(self, find) -> None:
        kinds = KINDS[::2]
        logits, sampling = rows_of([2.0] * len(kinds), 150), sampling_of(kinds)
        together = find(logits, sampling, 7)
        for row in (0, 2, 3, 5):
            own = slice(row, row + 1)
            alone = find(logits[own].clone(), part_of(sampling, own), 7)
            assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])
