"""The noise: golden values that any kernel must meet, the Gumbel law, and that no two rows know of each other."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from foresay.spec.sample import Noise, gumbel_row
from foresay.spec.sampling import derive_seed, mix64
from tests.spec.laws import ALPHA, gumbel

_WORD = (1 << 32) - 1
#: (seed, absolute position, token id) -> the 31 random bits of the noise value. A kernel is held to these too.
GOLDEN = {
    (0, 0, 0): 440_314_595,
    (0, 0, 1): 1_322_271_912,
    (0, 1, 0): 214_043_839,
    (1, 0, 0): 1_691_833_872,
    (42, 1000, 49151): 17_862_612,
    (2**32 - 1, 131071, 151935): 33_120_520,
    (2**64 - 1, 7, 12345): 327_633_683,
}


def random_bits(seed: int, position: int, token: int) -> int:
    """The hash in integers of any size, as the module docstring of `foresay.spec.sample` defines it."""
    key = mix64(mix64(seed) ^ position)
    low, high = key & _WORD, key >> 32
    x = token * 0x9E3779B1 & _WORD
    x ^= x >> 15
    x = x * 0x85EBCA77 & _WORD
    x ^= x >> 13
    x = (x ^ low) * 0xC2B2AE3D & _WORD
    x ^= x >> 16
    x = (x + high) * 0x27D4EB2F & _WORD
    x ^= x >> 15
    x = x * 0x165667B1 & _WORD
    x ^= x >> 16
    return x & 0x7FFFFFFF


def noise_value(bits: int) -> float:
    """The Gumbel number made of 31 bits: the uniform rounded to float32, the logarithms in float64."""
    rounded = float(torch.tensor(bits, dtype=torch.float32))
    uniform = float(torch.tensor(rounded * 2.0**-31 + 2.0**-32, dtype=torch.float32))
    return -math.log(-math.log1p(-min(uniform, 1.0 - 2.0**-24)))


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the published generator for state 0 and 1234567.
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1234567) == 6457827717110365317


def test_golden_bits() -> None:
    assert {key: random_bits(*key) for key in GOLDEN} == GOLDEN


@pytest.mark.parametrize("vocab_size", [1, 7, 97, 4096, 49152])
def test_whole_rows_are_made_of_the_same_integers(vocab_size: int) -> None:
    for seed, position in product((0, 1, 2**40 + 3), (0, 5, 2**17)):
        row = gumbel_row(seed, position, vocab_size)
        assert row.dtype == torch.float32
        assert torch.allclose(row, gumbel(seed, position, vocab_size)[0], rtol=2e-6, atol=2e-6)
        for token in {0, vocab_size // 2, vocab_size - 1}:
            assert float(row[token]) == pytest.approx(
                noise_value(random_bits(seed, position, token)), rel=2e-6, abs=2e-6
            )


def test_a_row_has_the_same_bits_each_time_for_every_caller() -> None:
    noise = Noise(11, 4097)
    for position in (8, 9, 9, 8):
        row = noise.row(position)
        assert row.shape == (4097,) and torch.equal(row, gumbel_row(11, position, 4097))
        assert torch.equal(row, Noise(11, 4097).row(position))


def test_the_noise_is_gumbel() -> None:
    values = torch.cat([gumbel_row(2024, position, 151936) for position in range(7)]).double()
    count = len(values)
    assert bool(values.isfinite().all())
    assert abs(float(values.mean()) - 0.5772156649) < 6 * math.pi / math.sqrt(6 * count)
    assert abs(float(values.var()) - math.pi**2 / 6) < 6 * math.pi**2 / 6 * math.sqrt(4.4 / count)
    ordered = torch.exp(-torch.exp(-values.sort().values))
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    assert distance * math.sqrt(count) < math.sqrt(math.log(2 / ALPHA) / 2)  # Kolmogorov and Smirnov, large count


def test_the_large_values_are_as_many_as_they_should_be() -> None:
    """The winners of a sample come from the upper tail, which the other tests hardly see."""
    values = gumbel(77, range(400), 8192)
    for threshold in (4.0, 6.0, 8.0, 10.0):
        expected = values.numel() * -math.expm1(-math.exp(-threshold))
        assert abs(int((values > threshold).sum()) - expected) < 5 * math.sqrt(expected) + 1, threshold


@pytest.mark.parametrize(
    ("seed", "position", "roll"),
    [
        (100, 51, 0),
        (100, 50 + 2**16, 0),
        (101, 50, 0),
        (50, 100, 0),
        (derive_seed(100, 1), 50, 0),  # the second choice of the request
        (100 + 2**32, 50, 0),
        (100, 50, 1),
        (100, 50, 4096),  # tokens in the next page of ids
    ],
)
def test_rows_are_not_correlated(seed: int, position: int, roll: int) -> None:
    rows = gumbel_row(100, 50, 151936), gumbel_row(seed, position, 151936).roll(roll)
    correlation = torch.corrcoef(torch.stack([row.double().argsort().argsort().double() for row in rows]))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(len(rows[0]))


def test_seeds_of_choices() -> None:
    assert derive_seed(7, 0) == 7
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = [derive_seed(seed, index) for seed in (0, 1, 7) for index in range(100)]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(-1, 3) == derive_seed(2**64 - 1, 3)
