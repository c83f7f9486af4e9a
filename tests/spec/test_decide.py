"""What a request changes about its logits is changed where they are; a copy is made only for log-probabilities."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foresay.spec.decide import Nodes
from foresay.spec.errors import InvalidRequest, NumericalError
from foresay.spec.tree import DraftTree
from tests.drafters.test_candidates import OPTIONS, VOCAB, sequence
from tests.spec.trees import random_tree


class Copies(TorchDispatchMode):
    """The ops that made so many numbers, or more, elsewhere."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.numel() >= self._count:
            given = [each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)]
            if result.untyped_storage().data_ptr() not in given:
                self.made.append(str(func))
        return result


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("logprobs", [None, 2])
def test_copies_are_made_where_log_probabilities_are_read(options, logprobs) -> None:
    tree = random_tree(random.Random(1), 20, 40, root=30)
    raw, banned = torch.randn(len(tree), VOCAB), torch.rand(len(tree), VOCAB) < 0.3
    rows = raw.clone()
    nodes = Nodes(sequence(1.0, logprobs=logprobs, **options), tree, rows, banned)
    with Copies(raw.numel()) as copies:
        unsampled = nodes.unsampled()
    assert unsampled.logits is rows and rows[banned].isneginf().all()
    assert len(copies.made) == (logprobs is not None)
    if logprobs is not None:
        assert torch.equal(nodes.logits, raw)


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        (3, math.nan, NumericalError),
        (3, math.inf, NumericalError),
        (..., -math.inf, NumericalError),
        (3, 0.0, InvalidRequest),
        (3, -math.inf, InvalidRequest),
    ],
)
def test_why_nothing_could_be_sampled_is_said_of_what_the_model_made(place, value, error, logprobs) -> None:
    """Bans hide it: of the row that is sampled from nothing finite is left either way."""
    row = torch.zeros(1, VOCAB)
    row[0, place] = value
    s = sequence(1.0, allowed_token_ids=[5], logprobs=logprobs)
    nodes = Nodes(s, DraftTree.chain([30]), row, torch.ones(1, VOCAB, dtype=torch.bool))
    assert not nodes.unsampled().logits.isfinite().any()
    assert type(nodes.why_nothing()) is error
