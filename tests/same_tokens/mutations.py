"""Small breaches of what docs/same-tokens.md argues; each must be seen by the comparison of this suite.

Each function takes pytest's ``monkeypatch``, which also undoes it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpaging import KVStore
from spec import step
from spec.adjust import Adjustment
from spec.constrain import Guarded
from spec.noise import Noise
from spec.score import logprobs_of_run
from verifier.batch import Segment
from verifier.model.decoder import Decoder
from verifier.model.rows import RowCounts
from verifier.ops import attention, spans


def untried_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products have as many rows as there are, one too: nothing is padded or split to numbers that were tried."""
    monkeypatch.setattr(RowCounts, "fitting", lambda self, rows: rows)
    monkeypatch.setattr(RowCounts, "multiply", lambda self, product, x: product(x))
    monkeypatch.setattr(Decoder, "fitting", lambda self, rows: rows)


def single_pages() -> bool:
    """Whether this processor's products are over one page each, whatever a row is part of."""
    return not all(spans.adds_in_order(width, 16, 64) for width in (16, 32, 64, 128))


def trees_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's values are summed page by page, a chain's span by span."""

    def span_sums(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
        by_page = segment.path_columns is not None
        return (spans._by_page if by_page else spans.span_sums)(weights, values, segment)

    monkeypatch.setattr(attention, "span_sums", span_sums)


def weights_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are added up in the order of the slots, gaps of other paths between them."""
    monkeypatch.setattr(attention, "_weight_sums", lambda weights, segment: weights.sum(dim=-1, keepdim=True))


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the depth in the step, not by the absolute position."""

    def by_depth(self: Noise, positions: list[int]) -> Tensor:
        return torch.stack([self.row(position - min(positions)) for position in positions])

    monkeypatch.setattr(Noise, "rows", by_depth)


def sums_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and spans are added up by ``sum``, whose order depends on how many there are."""
    monkeypatch.setattr(attention, "_SUM_LANES", 1)
    monkeypatch.setattr(attention, "_merge", lambda blocks: blocks.permute(1, 2, 3, 0).contiguous().sum(dim=-1))


def no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted rows stay in the slots where the tree had them."""
    monkeypatch.setattr(KVStore, "move", lambda self, source, destination: None)


def penalties_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a tree are penalised by the committed counts alone."""
    apply = Adjustment.apply
    monkeypatch.setattr(
        Adjustment, "apply", lambda self, logits, text, paths: apply(self, logits, text, [[]] * len(paths))
    )


def masks_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar does not follow the path: every node may be followed by what may follow the root."""
    banned = Guarded.banned

    def of_the_root(self: Guarded, tokens: list[int], parents: list[int]) -> Tensor | None:
        root = banned(self, tokens[:1], parents[:1])
        return None if root is None else root.expand(len(tokens), -1)

    monkeypatch.setattr(Guarded, "banned", of_the_root)


def logprobs_of_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs are taken from the row that a token leads to, not from the one it was drawn from."""
    monkeypatch.setattr(
        step,
        "logprobs_of_run",
        lambda sequence, logits, path, emitted: logprobs_of_run(sequence, logits, [*path[1:], path[-1]], emitted),
    )
