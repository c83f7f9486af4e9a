"""The sample against the exact law of every filter, and that it is a function of its own row alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foresay.spec.logits import row_sum
from foresay.spec.sample import BROKEN, sample
from foresay.spec.sampling import SamplingParams, derive_seed
from tests.spec.laws import ALPHA, chi_square_tail, gumbel, law, pair_tail, reference_draw

#: Ties among the first, in the middle and in the tail; one token that is ruled out.
LOGITS = torch.tensor([0.5, 4.0, 4.0, 2.5, -1.5, 2.5, 2.5, 1.0, -math.inf, 1.0, 3.0, 0.0, -1.5, -2.0])
#: The same with two tokens far ahead: a row whose winner is one of them is not looked at twice, which takes time.
STEEP = torch.where(LOGITS == 4.0, 9.0, LOGITS)
WARPS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.8),
    "boiling": SamplingParams(temperature=30.0),
    "top-k 1, a tie": SamplingParams(top_k=1),
    "top-k 5, a tie at the border": SamplingParams(top_k=5),
    "top-k of everything": SamplingParams(top_k=14),
    "top-k beyond everything, hot": SamplingParams(top_k=1000, temperature=1.8),
}
FILTERS = {
    "top-p": SamplingParams(top_p=0.9998, temperature=1.1),
    "top-p ends within a tie": SamplingParams(top_p=0.998),
    "min-p": SamplingParams(min_p=0.0008, temperature=1.1),
    "top-k and top-p": SamplingParams(top_k=9, top_p=0.998),
    "top-p and min-p": SamplingParams(top_p=0.9996, min_p=0.00015, temperature=1.1),
    "all of them": SamplingParams(top_k=10, top_p=0.9998, min_p=0.0003, temperature=1.1),
}
#: So strict that most samples have to list the survivors.
STRICT = {
    "top-p": SamplingParams(top_p=0.5),
    "top-p, hot": SamplingParams(top_p=0.3, temperature=1.8),
    "min-p": SamplingParams(min_p=0.3),
    "min-p 1": SamplingParams(min_p=1.0, temperature=1.8),
    "all of them": SamplingParams(top_k=7, top_p=0.8, min_p=0.3, temperature=2.5),
}
#: Filters for rows of real size.
LARGE = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.8),
    "greedy": SamplingParams(temperature=0.0),
    "top-k": SamplingParams(top_k=40),
    "top-p": SamplingParams(top_p=0.9),
    "tight top-p": SamplingParams(top_p=0.1),
    "loose top-p": SamplingParams(top_p=0.999, temperature=1.8),
    "min-p": SamplingParams(min_p=0.05),
    "all of them": SamplingParams(top_k=200, top_p=0.8, min_p=0.02, temperature=0.7),
}


def _draws(sampling: SamplingParams, noise: Tensor, logits: Tensor = LOGITS) -> Tensor:
    return torch.cat([sample(logits.expand(rows.shape), sampling, rows) for rows in noise.split(50_000)])


def _tail(sampling: SamplingParams, noise: Tensor, logits: Tensor = LOGITS) -> float:
    samples = _draws(sampling, noise, logits)
    return chi_square_tail(torch.bincount(samples, minlength=len(logits)), law(logits, sampling))


@pytest.fixture(scope="module")
def million() -> Tensor:
    """The noise of a million positions (and a few, to make a round number of windows)."""
    return gumbel(20260, range(2**20), len(LOGITS))


@pytest.mark.slow
@pytest.mark.parametrize("name", WARPS)
def test_a_million_draws_follow_the_law(name: str, million: Tensor) -> None:
    assert _tail(WARPS[name], million) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in ("top-p", "top-p and min-p") else ()) for name in FILTERS],
)
def test_a_million_filtered_draws_follow_the_law(name: str, million: Tensor) -> None:
    assert _tail(FILTERS[name], million, STEEP) > ALPHA


@pytest.mark.parametrize("name", STRICT)
def test_strict_filters_follow_the_law(name: str) -> None:
    assert _tail(STRICT[name], gumbel(20261, range(3_000), len(LOGITS))) > ALPHA


def test_the_law_test_notices_a_wrong_law(million: Tensor) -> None:
    samples = _draws(SamplingParams(), million)
    counts = torch.bincount(samples, minlength=len(LOGITS))
    assert chi_square_tail(counts, law(LOGITS, SamplingParams(temperature=1.01))) < ALPHA
    assert chi_square_tail(counts, law(LOGITS, SamplingParams(top_p=0.999))) < ALPHA
    assert chi_square_tail(counts, law(LOGITS + torch.eye(len(LOGITS))[3] / 50, SamplingParams())) < ALPHA


def test_neighbouring_positions_know_nothing_of_each_other(million: Tensor) -> None:
    expected = law(LOGITS, SamplingParams())
    samples = _draws(SamplingParams(), million)
    for apart in (1, 2, 64):
        windows = samples.unflatten(0, (-1, 2 * apart))  # of each, one pair: so that no sample is in two pairs
        assert pair_tail(windows[:, 0], windows[:, apart], expected) > ALPHA, apart


def test_neighbouring_seeds_and_choices_know_nothing_of_each_other() -> None:
    expected = law(LOGITS, SamplingParams())
    seeds = range(500, 100_500)
    first, following, second_choice = (
        sample(LOGITS.expand(100_000, -1), SamplingParams(), gumbel(others, 40, len(LOGITS)))
        for others in (seeds, [seed + 1 for seed in seeds], [derive_seed(seed, 1) for seed in seeds])
    )
    assert pair_tail(first[::2], following[::2], expected) > ALPHA
    assert pair_tail(first, second_choice, expected) > ALPHA


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("vocab_size", [4096, 49152])
def test_large_rows_draw_what_the_spelled_out_filters_draw(vocab_size: int, name: str) -> None:
    sampling = LARGE[name]
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits *= torch.linspace(0.5, 6.0, 24)[:, None]
    noise = gumbel(31, range(24), vocab_size)
    expected = [reference_draw(logits[row], sampling, noise[row]) for row in range(24)]
    assert sample(logits, sampling, noise).tolist() == expected


@pytest.mark.parametrize("top_p", [5e-324, 1e-45, 3e-8, 1e-7, 1 - 1e-7])
@pytest.mark.parametrize("vocab_size", [97, 49152])
def test_top_p_next_to_its_ends(vocab_size: int, top_p: float) -> None:
    """Nearly flat rows whose noise picks the one token that is not among the likeliest."""
    logits, noise = torch.zeros(1, vocab_size), torch.zeros(1, vocab_size)
    logits[0, 5], noise[0, 5] = -1e-4, 9.0
    assert sample(logits, SamplingParams(top_p=top_p), noise).tolist() == [5 if top_p > 0.5 else 0]


@pytest.mark.parametrize("vocab_size", [17, 128, 384])
def test_small_rows_with_many_ties_draw_what_the_spelled_out_filters_draw(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-4, 5, (60, vocab_size), generator=generator) / 2.0
    noise = gumbel(32, range(60), vocab_size)
    for name, sampling in (WARPS | FILTERS | {f"strict {name}": params for name, params in STRICT.items()}).items():
        expected = [reference_draw(row, sampling, rows) for row, rows in zip(logits, noise, strict=True)]
        assert sample(logits, sampling, noise).tolist() == expected, name


@pytest.mark.parametrize(("vocab_size", "rows"), [(97, 64), (4096, 32), (49152, 9), (151936, 4)])
def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch(vocab_size: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 2.5).bfloat16().float()
    noise = gumbel(9, range(rows), vocab_size)
    elsewhere = torch.randperm(rows, generator=generator)
    for name, sampling in LARGE.items():
        together = sample(logits, sampling, noise)
        alone = torch.cat([sample(logits[i : i + 1], sampling, noise[i : i + 1]) for i in range(rows)])
        assert torch.equal(alone, together), name
        assert torch.equal(sample(logits[elsewhere], sampling, noise[elsewhere]), together[elsewhere]), name
        for size in (2, 3, rows - 1):
            start = int(torch.randint(rows - size + 1, (1,), generator=generator))
            part = slice(start, start + size)
            assert torch.equal(sample(logits[part], sampling, noise[part]), together[part]), (name, size)


@pytest.mark.parametrize(("vocab_size", "rows"), [(97, 64), (4096, 12), (49152, 6), (151936, 3)])
def test_a_decision_on_the_edge_falls_the_same_way_anywhere_in_a_batch(vocab_size: int, rows: int) -> None:
    """top-p is set to the very mass of the tokens likelier than a row's winner: the last bit of a sum decides."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator) * 2.5
    noise = gumbel(10, range(rows), vocab_size)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    winners = (logits + noise).argmax(-1)
    likelier = row_sum(weights * (logits > logits.gather(-1, winners[:, None])))
    edges = (likelier / row_sum(weights)).tolist()
    for row in range(min(rows, 12)):
        for nudge in (-1e-7, 0.0, 1e-7):
            if not 0.0 < edges[row] + nudge < 1.0:
                continue
            sampling = SamplingParams(top_p=edges[row] + nudge)
            alone = sample(logits[row : row + 1], sampling, noise[row : row + 1])
            first = max(0, row - 3)
            assert sample(logits[first : row + 1], sampling, noise[first : row + 1])[-1] == alone[0]


@pytest.mark.parametrize("vocab_size", [97, 4095, 4096, 4097, 49152, 151936])
def test_a_row_has_the_same_sum_alone_in_a_batch_and_on_two_threads(vocab_size: int) -> None:
    logits = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    alone = torch.cat([row_sum((row - row.max()).exp()[None]) for row in logits])
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    assert torch.allclose(alone.double(), weights.double().sum(-1), rtol=1e-6)
    for part in (slice(0, 2), slice(3, 8), slice(0, 17)):
        assert torch.equal(row_sum(weights[part]), alone[part])
    torch.set_num_threads(2)
    try:
        assert torch.equal(row_sum((logits - logits.amax(-1, keepdim=True)).exp()), alone)
        assert torch.equal(row_sum((logits[5:6] - logits[5:6].max()).exp()), alone[5:6])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-20, 1e-37, 1e-44, 5e-324])
def test_a_temperature_near_0_draws_the_largest(temperature: float) -> None:
    logits = torch.tensor([[1.0, 9.0, 12.0, -5.0], [-7.0, -3.0, -9.0, -4.0], [0.0, -1.0, -2.0, 0.5]])
    noise = gumbel(3, range(3), 4)
    assert sample(logits, SamplingParams(temperature=temperature), noise).tolist() == [2, 1, 3]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.0), LARGE["all of them"]])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_one_broken_number_breaks_its_row_alone(broken: float, sampling: SamplingParams) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    noise = gumbel(3, range(3), 50)
    before = sample(logits, sampling, noise).tolist()
    logits[1, 7] = broken
    assert sample(logits, sampling, noise).tolist() == [before[0], BROKEN, before[2]]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.0), LARGE["all of them"]])
def test_a_row_that_rules_everything_out_is_broken(sampling: SamplingParams) -> None:
    logits = torch.zeros(2, 50)
    logits[1] = -math.inf
    assert sample(logits, sampling, gumbel(3, range(2), 50))[1] == BROKEN


def test_the_inputs_are_left_alone() -> None:
    logits, noise = torch.randn(5, 40), gumbel(6, range(5), 40)
    before = logits.clone(), noise.clone()
    for sampling in (*WARPS.values(), *FILTERS.values(), *STRICT.values(), SamplingParams(temperature=0.0)):
        sample(logits, sampling, noise)
    assert torch.equal(logits, before[0])
    assert torch.equal(noise, before[1])
