"""Drafters that are fed with the target's hidden states, their features.

These lie in a store on the sequences' pages, each in the slot of its position: so they come with a prefix hit, are
there for whoever takes another place, and a captured step finds and stores them on the device. A text whose features
nobody stored (pages from a time when another drafter was asked) gets no drafts until it is computed again.

Legend: H width of what is stored, R rows.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from drafters.levels import TreeDrafter
from kvpaging import KVStore, PagePool, PageTable
from spec.features import Features
from spec.protocols import FeatureRequest
from spec.sequence import SequenceState
from spec.tree import DraftTree
from verifier.graphs.proposer import Taken
from verifier.graphs.state import StepState


class FedDrafter(TreeDrafter):
    """Owns the store of features. needs: what it is fed with. width, dtype, device: of what is stored, H the width."""

    def __init__(
        self,
        name: str,
        dynamic: bool,
        pool: PagePool,
        needs: FeatureRequest,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        token_ids: Tensor | None,
    ) -> None:
        super().__init__(name, dynamic, device, pool, token_ids)
        self.needs = needs
        self.features = KVStore(pool, 1, 1, width, dtype, device, value_dim=0)

    @abstractmethod
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: what is stored of the target's features."""

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Store the features of newly committed positions, unless some before them are missing."""
        table, fused = sequence.table, self.fuse(features)
        self.rows[table.slots(table.length - len(fused), table.length)] = fused
        self.stored(table, len(fused))

    def stored(self, table: PageTable, count: int) -> None:
        """The features of the last ``count`` positions were stored."""
        if self.features.filled(table) >= table.length - count:
            self.features.mark(table, table.length)

    @property
    def rows(self) -> Tensor:
        """[slots, H]: the features of all pages."""
        return self.features.keys[0, :, 0]

    def before(self, state: StepState, levels: int) -> Tensor:
        """[S * F, H]: the features behind the tokens that the first pass reads, those one place before."""
        return self.rows.index_select(0, self.ends(state, levels).slots_before(state))

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a text, and the features of all of it."""
        return bool(sequence.table.length) and self.knows(sequence)

    def knows(self, sequence: SequenceState) -> bool:
        """Whether the features of all committed positions are there."""
        return self.features.filled(sequence.table) == sequence.table.length

    def follow(self, state: StepState, taken: Taken, levels: int) -> None:
        """Store the features of the accepted path. What is stored behind it is scratch, as its slots are."""
        most = levels + 1
        path = taken.paths.paths[:, :most]
        order = torch.arange(state.size, device=path.device)[:, None]
        places = (path.clamp(min=0) + order * taken.slots.shape[1]).flatten()
        assert self.needs is not None, "it is fed"
        read = {name: taken.features[name].index_select(0, places) for name in self.needs.names}
        self.rows.index_copy_(0, taken.slots[:, :most].flatten(), self.fuse(read))

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The features of the path are there."""
        self.stored(sequence.table, len(path))
