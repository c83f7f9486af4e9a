"""Where rows begin in memory, which the kernels of a CPU do not ask (tests/kernels/test_cpu_sample.py has the rest)."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.kernels import candidates
from foresay.verifier.ops.records import RowSampling
from tests.kernels.on_device import test_sample
from tests.kernels.on_device.test_sample import FILTERS, rows_of, sampling_of

pytestmark = test_sample.pytestmark


def test_rows_are_drawn_alike_wherever_they_begin(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary that is no multiple of 4, as Granite 3's 49,155, most rows do not begin on 16 bytes."""
    monkeypatch.setattr(candidates, "block_of", lambda vocab_size: 128)  # many blocks
    rows = [SamplingParams(**filters) for filters in FILTERS]
    logits, sampling = rows_of([2.0] * len(rows), 303).to(device), sampling_of(rows)
    columns = [getattr(sampling, each.name).to(device) for each in fields(sampling)]
    whole = candidates.candidates(logits, RowSampling(*columns), 1, exact=True)[0]
    for first in range(1, len(rows)):
        later = RowSampling(*(each[first:].clone() for each in columns))
        assert torch.equal(candidates.candidates(logits[first:], later, 1, exact=True)[0], whole[first:])
