"""Heads that draft in captured steps on the simulated device: no number is read on the host, no shape changes."""

from __future__ import annotations

import pytest
import torch

from foresay.spec.tree import TreeShape
from tests.same_tokens.captured import captured_engine, run_freely
from tests.same_tokens.heads import KINDS, head_drafter, target_of
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import TEMPLATE, assert_same, jobs_of, plain
from tests.simulated.device import DEVICE, simulated
from tests.simulated.graph import assert_launched, captured
from tests.verifier.reading import load_decoder

LENGTHS = (9, 2, 17)
SHAPES = {"chain": TreeShape.chain(4), "static": TreeShape((3, 4, 2)), "template": TEMPLATE}


@pytest.mark.parametrize(("shape", "max_seqs"), [pytest.param("chain", 1, marks=pytest.mark.soak), ("template", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_in_captured_steps(pair, tmp_path, kind, shape, max_seqs) -> None:
    models = target_of(pair, kind, layers=3)
    jobs = jobs_of(models.vocab_size, LENGTHS, 16)
    expected = plain(models.target, jobs)
    head_drafter(kind, tmp_path, models.target, shape)
    with simulated():
        target = load_decoder(models.directory, torch.float32, DEVICE)
        moved = Pair(models.directory, models.draft_directory, target, target)
        make = head_drafter(kind, tmp_path, target, shape)
        engine = captured_engine(moved, make, SHAPES[shape], max_seqs=max_seqs, capture=captured)
        texts = run_freely(engine, jobs)
    assert_same(expected, texts)
    assert_launched(engine)
