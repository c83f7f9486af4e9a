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
from spec.protocols import Rows
from spec.score import logprobs_of_run
from verifier.batch import ForwardBatch, Segment, _Layout
from verifier.ops import attention


def single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over one row multiplies one row: no padding to two."""
    build = ForwardBatch.build

    def unpadded(*arguments) -> ForwardBatch:
        batch = build(*arguments)
        batch.tokens, batch.positions = batch.tokens[: batch.live], batch.positions[: batch.live]
        return batch

    monkeypatch.setattr(ForwardBatch, "build", unpadded)


def slot_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's rows meet their keys in the order of the slots, gaps between them, blocks counted by slot."""
    measured = _Layout.of

    def by_slot(part: Rows) -> _Layout:
        layout = measured(part)
        layout.depth = layout.reach - part.base
        return layout

    def tail(self: _Layout, full: int, blocks: int) -> tuple[Tensor, Tensor]:
        assert self.part.words is not None
        slots = self._tail_positions(full, blocks)
        nodes = (slots - self.part.base).tolist()
        seen = [[node < 0 or bool(word >> node & 1) for node in nodes] for word in self.part.words]
        return ~torch.tensor(seen), slots.expand(len(seen), -1)

    monkeypatch.setattr(_Layout, "of", by_slot)
    monkeypatch.setattr(_Layout, "_tree_tail", tail)


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the depth in the step, not by the absolute position."""

    def by_depth(self: Noise, positions: list[int]) -> Tensor:
        return torch.stack([self.row(position - min(positions)) for position in positions])

    monkeypatch.setattr(Noise, "rows", by_depth)


def sums_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are added up by ``sum``, whose order depends on the column and on how many rows there are."""

    def weight_sums(weights: Tensor, segment: Segment) -> Tensor:
        in_blocks = weights.unflatten(-1, (segment.blocks, segment.page_size)).sum(dim=-1)
        total: Tensor = in_blocks.transpose(1, 2).contiguous().sum(dim=1)
        return total.unsqueeze(-1)

    monkeypatch.setattr(attention, "_weight_sums", weight_sums)
    monkeypatch.setattr(attention, "_merge", lambda blocks: blocks.sum(dim=1))


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
