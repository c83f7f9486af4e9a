"""What a request changes of its logits is a value; it is applied where they are, and what was raw is known from it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foresay.spec.adjust import LogitEdits, edit_logits, packed, unpacked
from foresay.spec.errors import InvalidRequest, NumericalError
from foresay.spec.logits import edits_of, why_nothing
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
def test_logits_are_edited_where_they_are(options) -> None:
    tree = random_tree(random.Random(1), 20, 40, root=30)
    rows, banned = torch.randn(len(tree), VOCAB), torch.rand(len(tree), VOCAB) < 0.3
    edits = edits_of(sequence(1.0, **options), tree, packed(~banned))
    assert edits is not None
    with Copies(rows.numel()) as copies:
        edit_logits(rows, edits)
    assert rows[banned].isneginf().all()
    assert copies.made == []


def test_a_request_without_options_edits_nothing() -> None:
    assert edits_of(sequence(1.0), DraftTree.chain([30])) is None


@pytest.mark.parametrize("width", [1, 31, 32, 33, VOCAB])
def test_packed_bits_are_read_as_they_were(width) -> None:
    bits = torch.rand(5, width) < 0.5
    words = packed(bits)
    assert (words.dtype, words.shape) == (torch.int32, (5, -(-width // 32)))
    assert torch.equal(unpacked(words, width), bits)
    assert words[0, 0] & 1 == bits[0, 0]


def test_recorded_tokens_replace_what_could_be_sampled() -> None:
    rows = torch.tensor([[1.0, 2.0, -math.inf], [1.0, math.nan, 3.0], [1.0, 2.0, 3.0], [-math.inf] * 3])
    edit_logits(rows, LogitEdits(recorded=[(0, 2), (1, 2), (3, 1)]))
    assert rows[0].tolist() == [-math.inf, -math.inf, 0.0]
    assert rows[1].isnan().any()
    assert rows[2].tolist() == [1.0, 2.0, 3.0]
    assert rows[3].isneginf().all()


@pytest.mark.parametrize(
    ("token", "value", "error"),
    [
        (3, math.nan, NumericalError),
        (3, math.inf, NumericalError),
        (..., -math.inf, NumericalError),
        (3, 0.0, InvalidRequest),
        (3, -math.inf, InvalidRequest),
    ],
)
def test_why_nothing_could_be_sampled_is_named_from_the_raw_logits(token, value, error) -> None:
    row = torch.zeros(VOCAB)
    row[token] = value
    assert type(why_nothing(sequence(1.0, allowed_token_ids=[5]), row)) is error
