"""The sample as a kernel of a CPU: the same cases as on a GPU, on several processors and by one thread or two."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu import candidates as pieces
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.records import RowSampling
from foresay.verifier.ops.sample import best_children, sample_rows
from tests.kernels.on_device import test_sample
from tests.kernels.on_device.test_sample import *  # noqa: F403
from tests.kernels.on_device.test_sample import Drawing, rows_of, sampling_of, wanted
from tests.verifier.conftest import PROCESSORS, lesser
from tests.verifier.reading import threads

pytestmark = test_sample.pytestmark[1:]


@pytest.fixture(params=[*PROCESSORS, "plain"])  # type: ignore[no-redef]
def drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Drawing:
    """The kernels of a CPU."""
    made = lesser(request.param)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    return sample_rows


@pytest.fixture  # type: ignore[no-redef]
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces though the vocabulary is small."""
    monkeypatch.setattr(pieces, "PIECE", 128)


KINDS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.0, 0.7, 1.0)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (0, 0.6, 0.0), (50, 0.9, 0.0), (3, 1.0, 0.1))
]


@pytest.mark.parametrize("vocab_size", [4095, 4097, 49_152])
@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
def test_large_vocabularies(scale, vocab_size) -> None:
    logits, sampling = rows_of([scale] * len(KINDS), vocab_size), sampling_of(KINDS)
    sampled = []
    for count in (1, 2):
        with threads(count):
            sampled.append(sample_rows(logits, sampling).tolist())
    assert sampled[0] == sampled[1] == wanted(logits, sampling)


def test_a_recording_draws_what_its_tensors_hold_when_it_is_replayed() -> None:
    rng = random.Random(4)
    logits, count = torch.empty(len(KINDS), 777), torch.zeros(1, dtype=torch.int64)
    sampling = sampling_of(KINDS)
    columns = sampling.columns()
    with recording() as replay:
        sampled = sample_rows(logits, sampling, count=count)
    for rows in (1, len(KINDS), 4):
        logits.copy_(rows_of([1.0 + rows] * len(KINDS), 777))
        params = rng.sample(KINDS, len(KINDS))
        seeds, positions = [rng.getrandbits(64) for _ in KINDS], [rng.randrange(1 << 17) for _ in KINDS]
        for row, asks in enumerate(params):
            columns.write(row, asks, seeds[row], positions[row])
        count[0] = rows
        sampled.fill_(-7)
        replay()
        assert sampled[rows:].eq(-7).all(), "rows that are not there are not touched"
        assert sampled[:rows].tolist() == wanted(logits, RowSampling.from_params(params, seeds, positions))[:rows]


def chosen(logits: Tensor, seed: int, positions: int) -> Tensor:
    """One sample at each of so many positions."""
    sampling = RowSampling.from_params([SamplingParams()] * positions, [seed] * positions, range(positions))
    return sample_rows(logits.expand(positions, -1).contiguous(), sampling)


def test_the_law_of_the_draw() -> None:
    """Tokens come as often as the softmax says, within five standard deviations."""
    logits, positions = torch.tensor([1.0, 0.5, 0.0, 0.3, -2.0]), 40_000
    counts = torch.bincount(chosen(logits, 8, positions), minlength=5) / positions
    chances = logits.softmax(0)
    assert ((counts - chances).abs() < 5 * (chances * (1 - chances) / positions).sqrt()).all()


def test_ids_that_lie_apart_are_read_as_they_are() -> None:
    """A table's column, as translations between vocabularies have it."""
    logits, sampling = rows_of([1.0] * len(KINDS), 777), sampling_of(KINDS)
    token_ids = torch.arange(2 * 777).view(777, 2).flip(0)[:, 1].sort().values.repeat_interleave(2)[::2]
    assert not token_ids.is_contiguous()
    assert sample_rows(logits, sampling, token_ids).tolist() == wanted(logits, sampling, token_ids)
    tokens, _ = best_children(logits, sampling, 1, token_ids)
    with references():
        assert torch.equal(tokens, best_children(logits, sampling, 1, token_ids)[0])
