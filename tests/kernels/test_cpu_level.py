"""What a level of trees keeps, and where its nodes are: compiled kernels, and the references."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from foresay.spec.price import Bar
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import Pieces
from foresay.verifier.ops.sample import keep_children, worth_another
from foresay.verifier.ops.trees import known_tokens, positions_below
from tests.kernels.tree_cases import KNOTS, a_level, curves

pytestmark = pytest.mark.usefixtures("any_processor")


def test_no_child_is_likelier_than_its_parent() -> None:
    """Rounding makes a certain one more than certain."""
    children, chances, above = a_level(2, 1, 3, 2, False)
    by = Pieces(KNOTS, torch.ones(1, 4 * 28), torch.full((1, 4 * 28), 1e-6), 28, -1000.0)
    chances[:, :, 0] = 3e-7
    for way in (nullcontext, references):
        with way():
            kept = keep_children(children, chances, above, torch.ones(6, dtype=torch.int64), by)
        assert bool((kept.scores <= above.scores.gather(1, kept.indices)).all())
        assert bool((kept.scores == above.scores.gather(1, kept.indices)).any())


def test_of_what_is_dead_nothing_is_kept() -> None:
    children, chances, above = a_level(1, 1, 2, 3, False)
    dead, marks = torch.full_like(chances, -math.inf), torch.ones(4, dtype=torch.int64)
    kept = keep_children(children, dead, above, marks, curves(1, 1))
    assert kept.scores.tolist() == [[-math.inf] * 4]


def test_positions_and_tokens_of_another_model() -> None:
    ends, depths = torch.tensor([[5], [900]]), torch.tensor([[0, 1, 1], [2, 0, 7]], dtype=torch.int32)
    assert positions_below(ends, depths).tolist() == [5, 6, 6, 902, 900, 907]
    tokens, read = torch.tensor([[-1, 0, 3], [4, 5, 99]]), torch.tensor([7, 6, 5, 4, 3])
    assert known_tokens(tokens, 5).tolist() == [[0, 0, 3], [4, 4, 4]]
    assert known_tokens(tokens, 5, read).tolist() == [[7, 7, 4], [3, 3, 3]]
    with references():
        assert positions_below(ends, depths).tolist() == [5, 6, 6, 902, 900, 907]
        assert known_tokens(tokens, 5, read).tolist() == [[7, 7, 4], [3, 3, 3]]


@pytest.mark.parametrize("front", [1, 4, 20])
def test_a_tree_goes_on_where_its_nodes_reach_the_bar(front: int) -> None:
    """The same decisions as :meth:`foresay.spec.price.Bar.reached`, of the references and of the kernels."""
    decided = set()
    for seed in range(12):
        of, sequences = torch.Generator().manual_seed(seed), 1 + seed % 3
        scores = -3 * torch.rand(sequences, front, generator=of)
        scores[:, front - seed % 2 :] = -math.inf
        bars = torch.rand(sequences, 5, generator=of) * torch.tensor([0.9, 0.4, 0.2, 0.3, 0.2 * front])
        bars[seed % sequences, -1] *= seed % 4  # what costs nothing is always worth it
        nodes = [scores[s].exp().tolist() for s in range(sequences)]
        goes = [Bar(tuple(bars[s, :-2].tolist()), *bars[s, -2:].tolist()).reached(nodes[s]) for s in range(sequences)]
        for way in (nullcontext, references):
            with way():
                going = worth_another(scores, bars)
            assert torch.equal(going, scores.where(torch.tensor(goes)[:, None], -math.inf))
        decided |= set(goes)
    assert len(decided) == 2
