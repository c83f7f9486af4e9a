"""Drafters inside captured steps: on the device, with static shapes. Each implements
:class:`foresay.verifier.graphs.proposer.Proposer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from foresay.drafters.combined import united
from foresay.drafters.growth import Growth, GrowthPlan, levels
from foresay.drafters.hidden_states import HiddenStateDrafter
from foresay.drafters.levels import TreeDrafter, levels_ahead
from foresay.drafters.tree_builder import TreeBuilder
from foresay.spec.budget.members import MODEL_LEVELS, OPEN
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter, FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.shape import WHOLE_CHAIN
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape, merge
from foresay.verifier.graphs.buckets import MakeProposers
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, KeepsFeatures, Proposer, chain_columns
from foresay.verifier.graphs.staging import Column, Staged
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model_runner import ModelRunner


class RootOnly(Proposer):
    """Plain decoding. others: drafters that read the features in its steps too, so that they can draft later."""

    shape: TreeShape = ROOT_ONLY
    name, reach, takes_roots = "", 1, True

    def __init__(self, sequences: int, device: torch.device | str, others: Sequence[HiddenStateDrafter] = ()) -> None:
        self.readers: Sequence[KeepsFeatures] = others
        self.needs: FeatureRequest | None = united([other.needs for other in others])
        self._others = others
        self._columns = chain_columns(sequences, 1, device)
        self._counts = torch.ones(sequences, dtype=torch.int64, device=device)

    def propose(self, state: StepState) -> DeviceTree:
        """Only the roots."""
        return DeviceTree(state.roots[:, None].contiguous(), *self._columns, self._counts, True)

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """The other drafters store the features of the accepted paths."""
        for other in self._others:
            other.follow(state, taken, self.shape.levels)

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether nothing is drafted."""
        return scheduled.shape is not None and not scheduled.shape.levels

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The features are stored."""
        for other in self._others:
            other.stored(sequence, len(path))


class Drafts(RootOnly):
    """What a drafter's passes and stores propose outside captures, proposed inside them.

    vocab_size: the target's. exact: whether it drafts only exactly its shape, since each row takes time, as on a CPU;
    and only the drafter's vocabulary, if it has one. grows: the shape of what is drafted.
    """

    def __init__(
        self,
        drafter: TreeDrafter,
        shape: TreeShape,
        sequences: int,
        vocab_size: int,
        exact: bool = False,
        others: Sequence[HiddenStateDrafter] = (),
    ) -> None:
        super().__init__(sequences, drafter.device, others)
        self.drafter, self.shape, self.name = drafter, drafter.limited(shape), drafter.name
        self.readers = [*_readers([drafter]), *others]
        self.needs, self.grows = united([drafter.needs, self.needs]), self.shape
        self.reach, self.exact, self.takes_roots = drafter.reach(self.shape.levels), exact, not exact
        self._narrow = exact and drafter.vocabulary is not None
        with self._narrowed():
            columns = drafter.columns(vocab_size)
        self._plan = GrowthPlan(self.shape, sequences, drafter.device, drafter.free, columns)

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        """What is recorded in the block drafts only the drafter's vocabulary, if this does."""
        self.drafter.narrow = self._narrow
        try:
            yield
        finally:
            self.drafter.narrow = False

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root: a pass for each level."""
        with self._narrowed():
            growth = Growth(self._plan, state, self.drafter.token_ids)
            for _ in levels(growth, self.drafter):
                pass
            return growth.tree()

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """Update the drafter's stored state of the texts."""
        self.drafter.follow(state, taken, self.shape.levels)
        super().committed(state, taken)

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Compute what the first pass needs. False if it cannot draft for one of them."""
        for sequence in sequences:
            if not self.drafter.able(sequence):
                return False
            self.drafter.prepare(sequence, self.grows.levels)
        return True

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether it can draft this: a prefix of its shape; with a price, as many levels as are likely to be worth
        it."""
        return all(
            share.drafter == self.name and share.tree is None for share in scheduled.plan.shares
        ) and self._reaches(scheduled)

    def _reaches(self, scheduled: ScheduledSequence) -> bool:
        """The same for only this drafter's part of the plan."""
        shape = self._planned(scheduled)
        if self.exact:
            fits = self.drafter.narrows(scheduled.sequence) == self._narrow
            return fits and shape.price is None and self.drafter.limited(shape) == self.grows
        if not shape.levels:
            return True
        levels = levels_ahead(shape)
        begins = self.drafter.limited(shape).limited(levels) == self.grows.limited(levels)
        return begins and levels <= self.grows.levels and (shape.price is None) == (self.grows.price is None)

    def _planned(self, scheduled: ScheduledSequence) -> TreeShape:
        shares = scheduled.plan.shares
        if not shares:
            return scheduled.shape or ROOT_ONLY
        return next((share.shape for share in shares if share.drafter == self.name and share.tree is None), ROOT_ONLY)

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Write how far each tree may grow, and the current calibration."""
        if self.exact and self.grows.is_chain:
            return
        shapes = [self._planned(scheduled).limited(self.grows.levels) for scheduled in batch]
        kinds = [scheduled.sequence.sampling.kind for scheduled in batch]
        self._plan.write(self.drafter.calibration, shapes, kinds)

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """Add the chances of its nodes, which the calibration will learn from."""
        if self.grows.is_chain:
            chances = self.drafter.calibration.chain(sequence.sampling.kind, len(tree) - 1)
            return replace(tree, chances=(1.0, *chances))
        grown = self._drafted(sequence, index, more)
        return replace(tree, chances=grown.chances, grown=grown.grown)

    def _drafted(self, sequence: SequenceState, index: int, more: Sequence[Tensor]) -> DraftTree:
        """The tree that grew."""
        fresh = TreeBuilder(sequence, self.grows, self.drafter.calibration, None, [], fixed=self._plan.levels)
        self.drafter.drafted(fresh)
        return fresh.finish([part.numpy() for part in more], index, self.name)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Set marks, and update the calibration."""
        self.drafter.collected(sequence, tree, path)
        self.drafter.learn(sequence, path, tree.tokens)
        super().collected(sequence, tree, path)


class LookupHits(RootOnly):
    """The hits of lookups before the step, which the host writes. nodes: of the largest."""

    def __init__(
        self, sequences: int, nodes: int, device: torch.device, others: Sequence[HiddenStateDrafter] = ()
    ) -> None:
        super().__init__(sequences, device, others)
        each = ((sequences, nodes), torch.int64)
        columns: dict[str, Column] = dict.fromkeys(("tokens", "parents", "words"), each)
        self._staged = Staged(
            device, columns | {"depths": (each[0], torch.int32), "counts": ((sequences,), torch.int64)}
        )
        # Padding is below the root: an old word would be a second path to nodes of the tree, for recurrent layers.
        self._padding = 1 | 1 << np.arange(nodes)
        self._staged.arrays["words"][:] = self._padding
        self._staged.send()
        # As many levels as nodes: they may be a chain.
        self.shape = TreeShape.chain(nodes - 1)
        self._trees: list[DraftTree] = []

    def propose(self, state: StepState) -> DeviceTree:
        """The written trees, below the roots."""
        there = self._staged.tensors
        tokens = torch.cat((state.roots[:, None], there["tokens"][:, 1:]), dim=1)
        return DeviceTree(tokens, there["parents"], there["words"], there["depths"], there["counts"], chain=False)

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether there is room for the hit; no draft at all is fine too."""
        shares = scheduled.plan.shares
        if not shares:
            return super().takes(scheduled)
        return len(shares) == 1 and shares[0].tree is not None and len(shares[0].tree) <= self.shape.nodes

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """The trees of the next step."""
        self._trees, to = [], self._staged.writable()
        for index, scheduled in enumerate(batch):
            found = [share.tree for share in scheduled.plan.shares if share.tree is not None]
            tree = (
                merge(found, scheduled.plan.shape.nodes) if found else DraftTree.chain(scheduled.sequence.tokens[-1:])
            )
            self._trees.append(tree)
            nodes = slice(len(tree))
            columns = {"tokens": tree.tokens, "parents": tree.parents, "words": tree.ancestors, "depths": tree.depths}
            to["counts"][index], to["words"][index, len(tree) :] = len(tree), self._padding[len(tree) :]
            for name, column in columns.items():
                to[name][index, nodes] = column
        self._staged.send()

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """The tree as it was written."""
        return self._trees[index]


class Together(Drafts):
    """The hits of lookups and a growing tree, merged: common nodes belong to the lookups."""

    def __init__(
        self,
        found: LookupHits,
        drafter: TreeDrafter,
        shape: TreeShape,
        sequences: int,
        vocab_size: int,
        others: Sequence[HiddenStateDrafter] = (),
    ) -> None:
        super().__init__(drafter, shape, sequences, vocab_size, others=others)
        self.found = found
        nodes, deep = found.shape.nodes + self.grows.nodes - 2, max(found.shape.levels, self.grows.levels)
        self.shape = TreeShape((1 + nodes - deep,) + (1,) * (deep - 1))
        self._own: dict[str, DraftTree] = {}

    def propose(self, state: StepState) -> DeviceTree:
        """Grow the tree and merge both."""
        return joined(self.found.propose(state), super().propose(state), self.grows.levels)

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether the plan has at most one hit, and a tree of this drafter."""
        found = [share.tree for share in scheduled.plan.shares if share.tree is not None]
        drafting = {share.drafter for share in scheduled.plan.shares if share.tree is None}
        fits = all(len(tree) <= self.found.shape.nodes for tree in found)
        return len(found) < 2 and fits and drafting <= {self.name} and self._reaches(scheduled)

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Write both."""
        self.found.write(batch)
        super().write(batch)

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """Both trees, merged again, with each node's chance and drafter."""
        own = self._own[sequence.id] = self._drafted(sequence, index, more)
        both = merge([self.found.arrived(sequence, index, tree, ()), own])
        return replace(both, tokens=tree.tokens)  # those that were verified

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Passed to the drafter, as the path through its own tree."""
        own = self._own.pop(sequence.id)
        super().collected(sequence, own, own.path_of(sequence.tokens[len(sequence.tokens) - len(path) :]))


def joined(found: DeviceTree, tree: DeviceTree, levels: int) -> DeviceTree:
    """The found nodes, followed by those of a grown tree, of M nodes and ``levels`` levels, that are not among them, as
    :func:`foresay.spec.tree.merge` has them; with the tree's own rows."""
    (size, first), count = found.tokens.shape, tree.tokens.shape[1]
    order = torch.arange(first + count, device=tree.tokens.device).expand(size, -1)
    known, real = (order[:, : each.tokens.shape[1]] < each.counts[:, None] for each in (found, tree))
    numbers, none = _same(found, tree, known, levels), first + count - 1
    fresh = real & (numbers < 0)
    behind = found.counts[:, None] - 1 + fresh.cumsum(dim=1)
    numbers = numbers.where(~fresh, behind).where(real, none)

    def of_both(theirs: Tensor, ours: Tensor, nothing: int = 0) -> Tensor:
        room = torch.nn.functional.pad(theirs.where(known, nothing), (0, count), value=nothing)
        return room.scatter(1, numbers, ours)[:, :none].contiguous()

    above = numbers.gather(1, tree.parents.clamp(min=0)).where(order[:, :count] > 0, -1)
    parents = of_both(found.parents, above)
    assert tree.rows is not None, "it grew"
    return DeviceTree(
        of_both(found.tokens, tree.tokens),
        parents,
        _words(parents.clamp(min=0), order[:, :none]),
        of_both(found.depths, tree.depths),
        found.counts + fresh.sum(dim=1),
        chain=False,
        rows=of_both(torch.full_like(found.tokens, -1), tree.rows, -1),
        more=tree.more,
    )


def _same(found: DeviceTree, tree: DeviceTree, known: Tensor, levels: int) -> Tensor:
    """int64[S, M]: the found node equal to each node of a tree, -1 for none: with the same token below the same
    parent."""
    root = torch.arange(tree.tokens.shape[1], device=tree.tokens.device) == 0
    alike = (tree.tokens[:, :, None] == found.tokens[:, None]) & known[:, None]
    same = torch.full_like(tree.tokens, -1).masked_fill(root, 0)
    for _ in range(levels):
        above = same.gather(1, tree.parents.clamp(min=0))[:, :, None]
        both = alike & (found.parents[:, None] == above) & (above >= 0)
        same = both.long().argmax(dim=2).where(both.any(dim=2), -1).masked_fill(root, 0)
    return same


def _words(parents: Tensor, order: Tensor) -> Tensor:
    """int64[S, N]: the ancestor words. Each iteration doubles the levels they cover."""
    words, above = torch.ones_like(order) << order, parents
    for _ in range(6):
        words, above = words | words.gather(1, above), above.gather(1, above)
    return words.contiguous()


#: Levels of the chains and of the trees that are captured, up to a drafter's limit: a plan uses the smallest capture
#: that is deep enough. Then the nodes of lookup hits, alone and together with a tree.
_CHAINS, _TREES, _FOUND, _WITH_TREE = (2, 4, MODEL_LEVELS), (4, MODEL_LEVELS), (8, 32), 16
#: The most nodes of these: of lookup hits alone, and together with a tree.
MOST_FOUND, MOST_NODES = max(_FOUND), OPEN.nodes + _WITH_TREE - 1


def by_plan(
    models: Sequence[tuple[TreeDrafter, int]], looks: bool, verifier: ModelRunner, pinned: TreeShape | None = None
) -> MakeProposers:
    """The proposers for a budget that plans how much each drafter drafts. models: with the most levels of each. looks:
    whether any of the drafters is a lookup. pinned: the shape of every draft, if only the drafter is chosen."""
    device, vocab_size, readers = verifier.store.device, verifier.vocab_size, _readers([model for model, _ in models])
    shapes = planned_shapes if pinned is None else lambda most: [pinned.limited(most)]
    drafts = [(model, shape) for model, most in models for shape in shapes(most)]

    def made(size: int) -> list[Proposer]:
        proposers: list[Proposer] = [RootOnly(size, device, readers)]
        proposers += [LookupHits(size, nodes, device, readers) for nodes in _FOUND if looks]
        proposers += [Drafts(*draft, size, vocab_size, others=_beside(readers, draft[0])) for draft in drafts]
        if looks and pinned is None:
            proposers += [
                Together(LookupHits(size, _WITH_TREE, device), *draft, size, vocab_size, _beside(readers, draft[0]))
                for draft in drafts
                if draft[1].price is not None
            ]
        return proposers

    return made


def on_cpu(
    models: Sequence[tuple[TreeDrafter, int]], vocab_size: int, pinned: TreeShape | None = None
) -> list[Proposer]:
    """The proposers of steps that a CPU records whole: of one text that drafts a chain. None if the host is needed for
    a model's chains: others that draft for it would not be told what was committed. The rest as for :func:`by_plan`;
    pinned: the shape of every draft."""
    if any(model.staged for model, _ in models):
        return []
    readers = _readers([model for model, _ in models])
    shapes = [TreeShape.chain(levels) for levels in range(1, WHOLE_CHAIN + 1)] if pinned is None else [pinned]
    return [
        Drafts(model, shape, 1, vocab_size, True, _beside(readers, model))
        for model, most in models
        for shape in shapes
        if shape.is_chain and 0 < shape.levels <= most
    ]


def planned_shapes(most: int) -> list[TreeShape]:
    """The shapes captured for a drafter from which a budget requests at most this many levels."""
    chains, trees = (dict.fromkeys(min(levels, most) for levels in all) for all in (_CHAINS, _TREES))
    priced = replace(OPEN, price=Price(0.0, (0.0,)))
    return [*map(TreeShape.chain, chains), *map(priced.limited, trees)]


def _readers(models: Sequence[TreeDrafter]) -> list[HiddenStateDrafter]:
    return [model for model in models if isinstance(model, HiddenStateDrafter)]


def _beside(readers: Sequence[HiddenStateDrafter], model: TreeDrafter) -> list[HiddenStateDrafter]:
    return [reader for reader in readers if reader is not model]


def on_device(drafter: Drafter | None) -> TreeDrafter | None:
    """The drafter, if it can be captured with the step; None if it drafts on the host, or there is none."""
    return drafter if isinstance(drafter, TreeDrafter) else None
