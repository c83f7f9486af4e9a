"""How many ops a captured step launches: what bench/MEASUREMENTS.md says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.capture import CapturedGraphs
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.same_tokens.captured import captured_engine, draft_model
from tests.same_tokens.models import Pair
from tests.simulated.device import DEVICE, is_view, simulated
from tests.simulated.graph import captured
from tests.verifier.reading import load_decoder


def launches(pair: Pair, shape: TreeShape) -> Counter[str]:
    """By op, of the smallest step that drafts, or that does not."""
    with simulated():
        directories = (pair.directory, pair.draft_directory)
        moved = Pair(*directories, *(load_decoder(path, torch.float32, DEVICE) for path in directories))
        drafter = draft_model(moved) if shape.levels else lambda pool: None
        runner = captured_engine(moved, drafter, shape, max_seqs=1, capture=captured).runner
        assert isinstance(runner, GraphStepRunner)
        launch = next(iter(runner.buckets.values()))[-1].launch
    assert isinstance(launch, CapturedGraphs)
    graphs: Any = launch.graphs
    return Counter(name for each in graphs for name, _ in each.launches if not is_view(name))


@pytest.mark.parametrize(("shape", "passes", "besides"), [(ROOT_ONLY, 1, 21), (TreeShape.chain(4), 5, 72)])
def test_eight_ops_a_layer_and_few_besides(pair, shape, passes, besides) -> None:
    found = launches(pair("llama3", layers=2), shape)
    in_layers = 8 * 2 * passes
    print(f"{shape.levels} levels: {found.total()} ops, {in_layers} of them in layers: {dict(found)}")
    assert found["rotate_and_store"] == found["tree_attention"] == 2 * passes
    assert found.total() <= in_layers + besides
