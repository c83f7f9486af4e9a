"""Whether trees grow on, in one launch: the decisions of the torch code."""

from __future__ import annotations

import math

import pytest
import torch

from foresay.verifier.ops import level as op
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels import level
from foresay.verifier.ops.records import Prices
from tests.kernels.test_cpu_level import prices

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("most", "kept", "front"), [(3, 4, 1), (31, 20, 4)])
def test_trees_go_on(most: int, kept: int, front: int, device) -> None:
    decided = set()
    for seed in range(4):
        of = torch.Generator().manual_seed(seed)
        scores = [-(2 + most / 5) * torch.rand(3, count, generator=of) for count in (most, kept)]
        best, new = (each.sort(dim=1, descending=True).values for each in scores)
        best[:, most - seed % 2 :] = -math.inf
        there, _ = prices(seed, 3, most)
        given = best, new, new[:, :front].contiguous()
        with references():
            wanted = op.worth_another(*given, there)
        found = level.worth_another(*(each.to(device) for each in given), Prices(*(each.to(device) for each in there)))
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, wanted, strict=True))
        decided |= set((wanted[1] > -math.inf).any(dim=1).tolist())
    assert len(decided) == 2
