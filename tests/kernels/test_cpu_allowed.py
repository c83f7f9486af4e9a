"""A mask over logits: the compiled kernel does what torch does, for any width, on any number of threads."""

from __future__ import annotations

import pytest
import torch

from foresay.spec.adjust import LogitEdits, packed
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.sample import edit_logits, keep_allowed
from tests.verifier.reading import threads

ROWS = 6


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", [7, 33, 4096, 4101, 9000])
def test_what_is_not_allowed_is_minus_infinity(any_processor, width, count) -> None:
    bits, x = torch.rand(ROWS, width) < 0.5, torch.randn(ROWS, width)
    x[3], bits[4] = torch.nan, True
    for allowed in (bits, bits[:1]):
        wanted, found, words = x.masked_fill(~allowed, -torch.inf), x.clone(), packed(allowed)
        with threads(count):
            keep_allowed(found, words)
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
        with references():
            keep_allowed(found.copy_(x), words)
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_a_repeated_row_is_a_mask_too() -> None:
    x, allowed = torch.randn(3, 70), packed(torch.rand(1, 70) < 0.5)
    found, wanted = x.clone(), x.clone()
    keep_allowed(found, allowed.expand(3, -1))
    keep_allowed(wanted, allowed)
    assert torch.equal(found, wanted) and found.isneginf().any()


def test_masks_come_after_what_is_added() -> None:
    x, allowed = torch.zeros(2, 40), torch.ones(2, 40, dtype=torch.bool)
    allowed[1, 3] = False
    edit_logits(x, LogitEdits(bias=(torch.tensor([3]), torch.tensor([2.0])), allowed=packed(allowed)))
    assert x[:, 3].tolist() == [2.0, -torch.inf]
