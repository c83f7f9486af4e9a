"""Drafting inside a captured step: the interface of drafters, and the tree they return.

Everything but :meth:`Proposer.prepare` and :meth:`Proposer.collected` is captured: it may launch any kernels, but
shapes are fixed, no number is read on the host, and inputs are the tensors of the
:class:`~foresay.verifier.graphs.state.StepState` or tensors that live as long as the proposer.

Legend: S sequences, N nodes of a tree, R rows of the pass (S * N, perhaps padding), H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.forward_batch import signed
from foresay.verifier.graphs.state import StepState
from foresay.verifier.ops.records import AcceptedPaths


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """One tree for each sequence. tokens, parents, ancestors: int64[S, N] as in :class:`~foresay.spec.tree.DraftTree`,
    the last bit of a word as the sign.

    depths: int32[S, N]. counts: int64[S], the actual number of nodes; after them comes padding. chain: whether each
    node is the child of the one before, in every tree, so that accepted rows need no move. rows: int64[S, N], the row
    of the proposer's own passes that each node was, -1 for none; None: the same as its number. more: further data about
    the trees for the host.
    """

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor
    depths: Tensor
    counts: Tensor
    chain: bool
    rows: Tensor | None = None
    more: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptedTree:
    """A step's outcome on the device, before the state advances.

    paths: the accepted paths. slots: int64[S, N], where the KV of each node was written; the accepted rows are now in
    the first ``paths.lengths`` of them. features: the target's, of all rows [R, H], those of the trees first.
    """

    tree: DeviceTree
    paths: AcceptedPaths
    slots: Tensor
    features: Features

    def own_rows(self) -> tuple[Tensor, Tensor]:
        """int64[S, N], where the proposer's own rows of each path are, and int64[S], how many of them there are."""
        rows = self.tree.rows
        if rows is None:
            return self.paths.sources, self.paths.lengths
        path = self.paths.paths
        found = rows.gather(1, path.clamp(min=0)).where(path >= 0, -1)
        return self.slots.gather(1, found.clamp(min=0)), (found >= 0).long().cumprod(dim=1).sum(dim=1)


class KeepsFeatures(Protocol):
    """A drafter that stores the target's features of committed positions.

    needs: which. A captured step has it keep those of a prompt's rows; the host notes later how many of them are text.
    """

    needs: FeatureRequest | None

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Captured: store the features of positions, int64[R] like their slots."""
        ...

    def stored(self, sequence: SequenceState, count: int) -> None:
        """Host: those of the last ``count`` committed positions were stored."""
        ...


class Proposer(Protocol):
    """A proposer inside captured steps.

    shape: of its trees, always the same. needs: the target's features that it reads. reach: how many tokens of a text's
    end it reads, including the root. readers: who keeps the features of prompts. takes_roots: whether it takes plans
    without drafts.
    """

    name: str
    shape: TreeShape
    needs: FeatureRequest | None
    reach: int
    readers: Sequence[KeepsFeatures]
    takes_roots: bool

    def propose(self, state: StepState) -> DeviceTree:
        """Captured: a tree below every root. Its own rows go to slots past ``state.lengths``."""
        ...

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """Captured: update its own caches to the accepted paths. ``state`` is still as it was for :meth:`propose`."""
        ...

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Host: complete what :meth:`propose` reads for sequences that join. False: not possible now."""
        return True

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Host: whether it can draft what is planned for a sequence."""
        ...

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Host: write what :meth:`propose` reads that is not in the state, before each launch."""
        return

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """Host: a sequence's tree with what else is known of it. more: of all trees, as in :class:`DeviceTree`; index:
        its own."""
        return tree

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Host: this path of a captured step's tree was committed to ``sequence.table``: set marks, and learn."""
        ...


def chain_columns(sequences: int, nodes: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Parents and ancestors, int64[S, N], and depths, int32[S, N], of chains; new tensors that the caller may
    modify."""
    tree = DraftTree.chain([0] * nodes)
    columns = torch.tensor(tree.parents), torch.from_numpy(signed(tree.ancestors)), torch.tensor(tree.depths).int()
    parents, ancestors, depths = (c.expand(sequences, nodes).clone().to(device) for c in columns)
    return parents, ancestors, depths
