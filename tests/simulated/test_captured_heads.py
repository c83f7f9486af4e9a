"""Heads that draft in captured steps on the simulated device: no number is read on the host, no shape changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.drafters.parallel import DFlashDrafter
from foresay.spec.tree import TreeShape
from tests.same_tokens.captured import captured_engine, run_freely
from tests.same_tokens.heads import KINDS, head_drafter, target_of
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import Text
from tests.simulated.device import DEVICE, simulated
from tests.simulated.graph import assert_launched, captured
from tests.verifier.reading import load_decoder

LENGTHS = (9, 2, 17)
SHAPES = {"chain": TreeShape.chain(4), "tree": TreeShape((3, 4, 2))}


#: What others do alike: `make soak` tries them.
ALIKE = ("eagle1", "peagle", "dflash")


@pytest.mark.parametrize(("shape", "max_seqs"), [pytest.param("chain", 1, marks=pytest.mark.soak), ("tree", 3)])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind in ALIKE)) for kind in KINDS])
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


def test_a_block_is_drawn_in_one_launch_and_alike(pair, tmp_path, monkeypatch) -> None:
    """The drafts of a chain of four, which do not depend on each other, and the target's samples; and as many drafts
    are accepted as of those that are drawn one by one."""
    models = target_of(pair, "dflash", layers=3)
    jobs = jobs_of(models.vocab_size, LENGTHS, 16)
    head_drafter("dflash", tmp_path, models.target, "chain")
    drawn, steps, texts = list[int](), list[int](), list[dict[str, Text]]()
    for marginal in (True, False):
        monkeypatch.setattr(DFlashDrafter, "marginal", marginal)
        with simulated():
            target = load_decoder(models.directory, torch.float32, DEVICE)
            moved = Pair(models.directory, models.draft_directory, target, target)
            make = head_drafter("dflash", tmp_path, target, "chain")
            engine = captured_engine(moved, make, SHAPES["chain"], max_seqs=1, capture=captured)
            texts.append(run_freely(engine, jobs))
            steps.append(engine.steps)
            launch: Any = next(iter(engine.runner.buckets.values()))[-1].launch  # type: ignore[attr-defined]
            drawn.append(sum(name == "sample_rows" for graph in launch.graphs for name, _ in graph.launches))
    assert drawn == [2, 5] and steps[0] == steps[1]
    assert_same(*texts)
