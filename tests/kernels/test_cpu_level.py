"""What a level of trees keeps: compiled kernels against the references, and what is reported of them."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from foresay.spec.price import Bar
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import Above, Kept, Pieces
from foresay.verifier.ops.sample import keep_children, worth_another
from foresay.verifier.ops.trees import known_tokens, positions_below

pytestmark = pytest.mark.usefixtures("any_processor")
KNOTS = torch.cat((torch.linspace(-20, -0.1, 27), torch.full((5,), math.inf)))


def a_level(
    seed: int, sequences: int, front: int, looked: int, alike: bool
) -> tuple[torch.Tensor, torch.Tensor, Above]:
    """Children with ties and gaps below nodes of which some are dead."""
    of = torch.Generator().manual_seed(seed)
    rows = 1 if alike else front
    children = torch.randint(0, 1000, (sequences, rows, looked), generator=of)
    chances = (-4 * torch.rand(sequences, rows, looked, generator=of)).round(decimals=1)
    chances = chances.sort(dim=2, descending=True).values
    chances[torch.rand(chances.shape, generator=of) < 0.1] = -math.inf
    scores = (-3 * torch.rand(sequences, front, generator=of)).round(decimals=1)
    scores[:, front // 2] = -math.inf if front > 1 else 0.0
    words = torch.randint(1, 1 << 40, (sequences, front), generator=of)
    return children, chances, Above(scores, words, torch.randperm(90, generator=of)[:front])


def curves(seed: int, sequences: int) -> Pieces:
    of = torch.Generator().manual_seed(seed)
    slopes, shifts = torch.rand(2, sequences, 4 * 28, generator=of)
    return Pieces(KNOTS, slopes.contiguous(), (-shifts).contiguous(), 28, -1000.0)


def assert_same(found: Kept, wanted: Kept) -> None:
    for name, ours, theirs in zip(Kept._fields, found, wanted, strict=True):
        assert ours.is_contiguous() and torch.equal(ours, theirs.contiguous()), name


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("sequences", "front", "looked", "kept"), [(1, 1, 4, 4), (2, 5, 8, 12), (3, 31, 31, 31), (1, 2, 63, 63)]
)
def test_the_best_are_kept(sequences: int, front: int, looked: int, kept: int, alike: bool) -> None:
    for seed in range(8):
        children, chances, above = a_level(seed, sequences, front, looked, alike)
        marks = torch.arange(kept) << 41
        by = curves(seed, sequences)
        with references():
            wanted = keep_children(children, chances, above, marks, by)
        assert_same(keep_children(children, chances, above, marks, by), wanted)
        assert bool((wanted.scores.diff(dim=1).nan_to_num(-1.0) <= 0).all())


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
