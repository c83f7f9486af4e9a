"""The sample of many rows in two launches: token by token what spec/sample.py samples from each row alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels import candidates
from foresay.verifier.ops.records import RowSampling
from foresay.verifier.ops.sample import sample_rows
from tests.kernels.on_device.conftest import INTERPRETED

# numpy warns of what a GPU computes in silence: infinity minus infinity, where the result is not used.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")]
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks though the vocabulary is small."""
    monkeypatch.setattr(candidates, "block_of", lambda vocab_size: 128)


def rows_of(scales: Sequence[float], vocab_size: int) -> Tensor:
    """fp32[N, V] of normal logits, one row of each scale: from flat to peaked."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(len(scales), vocab_size, generator=generator) * torch.tensor(scales)[:, None]


def sampling_of(rows: Sequence[SamplingParams], seed: int = 1) -> RowSampling:
    rng = random.Random(seed)
    return RowSampling.from_params(rows, [rng.getrandbits(64) for _ in rows], [rng.randrange(1 << 17) for _ in rows])


#: Samples every row: the kernel that is tried.
Drawing = Callable[[Tensor, RowSampling, Tensor | None], Tensor]


@pytest.fixture
def drawing(device: torch.device) -> Drawing:
    """The kernels of a GPU."""

    def sampled(logits: Tensor, sampling: RowSampling, token_ids: Tensor | None = None) -> Tensor:
        there = None if token_ids is None else token_ids.to(device)
        columns = [getattr(sampling, each.name).to(device) for each in fields(sampling)]
        return candidates.candidates(logits.to(device), RowSampling(*columns), 1, there, exact=True)[0].flatten().cpu()

    return sampled


def some(sampling: RowSampling, rows: Sequence[int]) -> RowSampling:
    """Some of the rows."""
    return RowSampling(*(getattr(sampling, each.name)[list(rows)] for each in fields(sampling)))


def wanted(logits: Tensor, sampling: RowSampling, token_ids: Tensor | None = None) -> list[int]:
    """What the contract says, by torch."""
    with references():
        tokens: list[int] = sample_rows(logits, sampling, token_ids).tolist()
    return tokens


def assert_drawn_alike(
    logits: Tensor, sampling: RowSampling, drawing: Drawing, token_ids: Tensor | None = None
) -> list[int]:
    sampled: list[int] = drawing(logits, sampling, token_ids).tolist()
    assert sampled == wanted(logits, sampling, token_ids)
    return sampled


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_each_filter(filters, drawing) -> None:
    logits = rows_of([0.2, 1.0, 2.0, 4.0], 777)
    rows = [SamplingParams(temperature=t, **filters) for t in (1.0, 0.7, 1.5, 1.0)]
    plain = sampling_of([SamplingParams(temperature=r.temperature) for r in rows])
    filtered = assert_drawn_alike(logits, sampling_of(rows), drawing)
    assert filtered != wanted(logits, plain), "the filter takes a winner out"


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 1025])
@pytest.mark.usefixtures("small_blocks")
def test_any_vocabulary(vocab_size, drawing) -> None:
    rows = [SamplingParams(temperature=t, top_p=p) for t, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5))]
    assert_drawn_alike(rows_of([1.0, 1.0, 3.0], vocab_size), sampling_of(rows), drawing)


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_many_kinds_in_one_launch(drawing) -> None:
    rng = random.Random(5)
    rows = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, -1, 1, 5, 50, 10_000]),
            top_p=rng.choice([1.0, 0.95, 0.5]),
            min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        )
        for _ in range(16)
    ]
    assert_drawn_alike(rows_of([0.1, 1.0, 3.0, 6.0] * 4, 300), sampling_of(rows), drawing)


@pytest.mark.usefixtures("small_blocks")
def test_columns_that_are_other_tokens_of_the_target(drawing) -> None:
    """All ways a winner is found: at once, by a list, and by the search in the whole row."""
    filters = [{"temperature": 0.0}, {}, *FILTERS, {"top_p": 1e-4}, {"top_k": 200, "top_p": 0.1}] * 2
    logits, sampling = rows_of([1.0] * len(filters), 500), sampling_of([SamplingParams(**f) for f in filters])
    logits[3, 8] = math.nan
    token_ids = torch.randperm(152_000, generator=torch.Generator().manual_seed(2))[:500].sort().values
    sampled = assert_drawn_alike(logits, sampling, drawing, token_ids)
    columns = torch.searchsorted(token_ids, torch.tensor(sampled)).tolist()
    assert sampled[3] == BROKEN and columns != wanted(logits, sampling), "the noise is the target's"


@pytest.mark.usefixtures("small_blocks")
def test_ties_stay_in(drawing) -> None:
    logits = (rows_of([1.0] * 8, 400) * 2).round()
    logits[0] = 0.5
    filters: list[dict[str, Any]] = [{"top_k": 3}, {"top_k": 3}, {"top_p": 0.3}, {"top_k": 30, "top_p": 0.9}] * 2
    sampled = assert_drawn_alike(logits, sampling_of([SamplingParams(**f) for f in filters]), drawing)
    assert sampled[0] != 0, "all 400 tokens tie, so the top 3 are all of them"


@pytest.mark.usefixtures("small_blocks")
def test_greedy_takes_the_first_of_the_largest(drawing) -> None:
    logits = torch.zeros(2, 700)
    logits[0, [650, 300, 301]] = 4.0
    rows = [SamplingParams(temperature=0.0, top_k=5, top_p=0.5), SamplingParams(temperature=0.0)]
    assert assert_drawn_alike(logits, sampling_of(rows), drawing) == [300, 0]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(top_k=9, top_p=0.9)], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_rows_nothing_can_be_drawn_from(sampling, drawing) -> None:
    logits = rows_of([1.0] * 6, 300)
    logits[0, 299] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, :290] = -math.inf
    logits[4] = math.nan
    sampled = assert_drawn_alike(logits, sampling_of([sampling] * 6), drawing)
    assert sampled[:3] == [BROKEN] * 3 and sampled[4] == BROKEN
    assert sampled[3] >= 290 and sampled[5] != BROKEN


def test_a_flat_row_is_searched_to_its_end(drawing) -> None:
    logits = rows_of([0.01] * 3, 8500)
    logits[1, 8200:] += 0.1
    rows = [SamplingParams(top_p=0.1), SamplingParams(top_p=0.02), SamplingParams(top_k=600, top_p=0.5)]
    sampled = assert_drawn_alike(logits, sampling_of(rows), drawing)
    assert sampled[1] >= 8200, "the search goes over all of the row, not only over its first tiles"


@pytest.mark.usefixtures("small_blocks")
def test_top_p_asks_for_a_share_of_what_top_k_keeps(drawing) -> None:
    logits = rows_of([0.1] * 8, 300) - 30  # all below zero, where floats are ordered the other way round
    logits[:, 50:57] += 3.3  # two fifths of the mass
    assert_drawn_alike(logits, sampling_of([SamplingParams(top_k=7, top_p=0.5)] * 8), drawing)


@pytest.mark.usefixtures("small_blocks")
def test_one_round_two_and_many(drawing) -> None:
    """Of some rows the second winner stands; of some a ten-thousandth of the mass stays, halving after halving."""
    rows = [SamplingParams(top_p=p) for p in (0.7, 0.6, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 1e-4)]
    rows += [SamplingParams(min_p=0.9), SamplingParams(top_p=0.01, min_p=0.5)]
    assert_drawn_alike(rows_of([1.0] * len(rows), 700), sampling_of(rows), drawing)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps the functions it was made of")
@pytest.mark.usefixtures("small_blocks")
def test_few_rows_are_searched(drawing, monkeypatch) -> None:
    """Lists decide what top-k keeps; and no filter takes out the likeliest token."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_k": 64, "top_p": 0.8}, {"top_k": 9, "min_p": 0.1}]
    sampling = sampling_of([SamplingParams(**kind) for kind in (*kinds, {"top_p": 0.9})] * 8)
    logits = rows_of([2.0] * 40, 320)
    won = torch.tensor(wanted(logits, replace(sampling, top_p=torch.ones(40)))) == logits.argmax(dim=-1)
    searched, search = list[None](), candidates.search

    def seen(*given: Any) -> Any:
        searched.append(None)
        return search(*given)

    monkeypatch.setattr(candidates, "search", seen)
    assert_drawn_alike(logits, sampling, drawing)
    assert 0 < len(searched) == int((~won[4::5]).sum()) < 8, "of the rows with top-p alone"


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_which_little_is_allowed(drawing) -> None:
    logits = rows_of([1.0] * 4, 600)
    logits[:, :500] = -math.inf
    logits[2:, 502:] = -math.inf
    rows = [SamplingParams(top_k=k, top_p=p) for k, p in ((3, 0.8), (3, 1.0), (3, 0.7), (5, 0.3))]
    assert min(assert_drawn_alike(logits, sampling_of(rows), drawing)) >= 500


@pytest.mark.usefixtures("small_blocks")
def test_the_ends_of_every_range(drawing) -> None:
    ends = [
        SamplingParams(temperature=1e-29),
        SamplingParams(temperature=1e-31),
        SamplingParams(temperature=100.0, top_k=2),
        SamplingParams(top_p=1e-46, min_p=1.0),
        SamplingParams(top_k=301),
        SamplingParams(top_k=300, top_p=0.999999),
        SamplingParams(temperature=1e-9, top_k=3, top_p=0.9),
        SamplingParams(temperature=1e-9, top_k=100, top_p=0.9),
    ]
    logits = rows_of([1.0] * len(ends), 300)
    logits[-2:] = (logits[-2:] * 2).round()  # so ties at the border
    assert_drawn_alike(logits, sampling_of(ends), drawing)


@pytest.mark.usefixtures("small_blocks")
def test_a_row_is_drawn_alike_alone_and_in_company(drawing) -> None:
    rows = [SamplingParams(**filters) for filters in FILTERS]
    logits, sampling = rows_of([2.0] * len(rows), 500), sampling_of(rows)
    together = drawing(logits, sampling, None).tolist()
    for order in ([4, 3, 2, 1, 0], [5]):
        again = drawing(logits[order], some(sampling, order), None).tolist()
        assert again == [together[row] for row in order]


def test_blocks_cover_any_vocabulary_and_stay_few() -> None:
    for vocab_size in (1, 128_256, 151_936, 262_144, 262_208, 500_000):
        assert math.ceil(vocab_size / candidates.block_of(vocab_size)) <= candidates.MERGE
