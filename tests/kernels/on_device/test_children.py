"""The likeliest children of many rows in two launches: those of the torch code, in the same order."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from spec.sampling import SamplingParams
from verifier.ops.children import MOST
from verifier.ops.children import best_children as reference
from verifier.ops.draw import RowSampling
from verifier.ops.kernels import children

# numpy warns of what a GPU computes in silence: infinity minus infinity, where the result is not used.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value) encountered:RuntimeWarning"),
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": MOST},
    {"top_k": MOST + 1},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks though the vocabulary is small."""
    monkeypatch.setattr(children, "block_of", lambda width: 64)


def asked(kinds: list[dict[str, Any]]) -> RowSampling:
    rng = random.Random(1)
    places = [rng.randrange(1 << 17) for _ in kinds]
    return RowSampling.of([SamplingParams(**kind) for kind in kinds], [rng.getrandbits(64) for _ in kinds], places)


def found(
    logits: Tensor, sampling: RowSampling, count: int, device: torch.device, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    s = sampling
    columns = [t.to(device) for t in (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)]
    there = None if token_ids is None else token_ids.to(device)
    tokens, chances = children.best_children(logits.to(device), RowSampling(*columns), count, there)
    return tokens.cpu(), chances.cpu()


def assert_found_alike(
    logits: Tensor, kinds: list[dict[str, Any]], count: int, device: torch.device, token_ids: Tensor | None = None
) -> Tensor:
    tokens, chances = found(logits, asked(kinds), count, device, token_ids)
    wanted_tokens, wanted_chances = reference(logits, asked(kinds), count, token_ids)
    assert torch.equal(tokens, wanted_tokens)
    torch.testing.assert_close(chances, wanted_chances, rtol=1e-5, atol=1e-5)
    return chances


def rows_of(scales: list[float], width: int) -> Tensor:
    """fp32[N, V] of normal logits, one row of each scale: from flat to peaked."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(len(scales), width, generator=generator) * torch.tensor(scales)[:, None]


@pytest.mark.parametrize("count", [1, 7, MOST])
@pytest.mark.usefixtures("small_blocks")
def test_every_kind_of_row(count, device) -> None:
    chances = assert_found_alike(rows_of([0.2, 2.0, 4.0] * (len(KINDS) // 3), 150), KINDS, count, device)
    assert count < MOST or (chances == -math.inf).any(), "some filters leave fewer"


@pytest.mark.parametrize("width", [1, 2, 64, 65, 200])
@pytest.mark.usefixtures("small_blocks")
def test_any_vocabulary(width, device) -> None:
    kinds = KINDS[::3]
    assert_found_alike(rows_of([2.0] * len(kinds), width), kinds, 5, device)


@pytest.mark.usefixtures("small_blocks")
def test_columns_that_are_other_tokens_of_the_target(device) -> None:
    token_ids = torch.randperm(152_000, generator=torch.Generator().manual_seed(2))[:200]
    kinds = KINDS[1::2]
    assert_found_alike(rows_of([2.0] * len(kinds), 200), kinds, 6, device, token_ids)


@pytest.mark.usefixtures("small_blocks")
def test_the_likeliest_all_in_one_block(device) -> None:
    kinds = KINDS[2::3]
    logits = rows_of([1.0] * len(kinds), 200)
    logits[:, 64:128] += 12
    assert_found_alike(logits, kinds, 10, device)


@pytest.mark.usefixtures("small_blocks")
def test_ties_go_to_the_first_column(device) -> None:
    logits = (rows_of([1.0] * len(KINDS), 200) * 2).round()
    logits[0] = -logits[0].abs()
    logits[0, ::3] *= -1.0  # zeros of both signs
    logits[0] = logits[0].clamp(max=0.0)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}] * 3 + [{"top_k": 3}, {"top_k": 5, "min_p": 0.5}]
    assert_found_alike(logits[: len(kinds)], kinds, MOST, device)


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_rows_of_little(kind, device) -> None:
    logits = rows_of([1.0] * 5, 300)
    logits[0, 299] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, :290] = -math.inf
    logits[4] = math.nan
    chances = assert_found_alike(logits, [kind] * 5, 12, device)
    assert (chances[[2, 4]] == -math.inf).all() and chances[[0, 1, 3], 0].isfinite().all()


def test_a_whole_vocabulary_of_a_real_size(device) -> None:
    assert_found_alike(rows_of([3.0, 3.0], 151_936), [{"top_k": 5, "top_p": 0.95}, {}], 2, device)


@pytest.mark.usefixtures("small_blocks")
def test_a_row_is_alike_alone_and_in_company(device) -> None:
    kinds = KINDS[::2]
    logits, sampling = rows_of([2.0] * len(kinds), 150), asked(kinds)
    together = found(logits, sampling, 7, device)
    s = sampling
    for row in (0, 2, 3, 5):
        columns = (t[row : row + 1] for t in (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions))
        alone = found(logits[row : row + 1].clone(), RowSampling(*columns), 7, device)
        assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])
