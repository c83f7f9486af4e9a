"""Drafters inside captured steps: on the device, with static shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from foresay.drafters.calibration import ALWAYS, NEVER, Calibration, Curves, WrittenBars
from foresay.drafters.combined import own_path, united
from foresay.drafters.cut import joined
from foresay.drafters.growth import Growth, GrowthPlan, Level, levels
from foresay.drafters.hidden_states import HiddenStateDrafter
from foresay.drafters.levels import TreeDrafter, levels_ahead
from foresay.drafters.tree_builder import TreeBuilder
from foresay.spec.budget.members import MODEL_LEVELS, OPEN
from foresay.spec.names import together
from foresay.spec.price import Bar, Price
from foresay.spec.protocols import Drafter, FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.shape import WHOLE_CHAIN
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape, merge
from foresay.verifier.graphs.buckets import MakeProposers
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, KeepsFeatures, Proposer, RootOnly
from foresay.verifier.graphs.staging import Column, Staged
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model_runner import ModelRunner

_UNKNOWN = np.array([np.nan])


class Drafts:
    """Implements :class:`foresay.verifier.graphs.proposer.Proposer`, with the same passes and stores as outside
    captures.

    vocab_size: the target's. exact: whether it drafts only exactly its shape, since each row takes time, as on a CPU;
    and only the drafter's vocabulary, if it has one.
    """

    def __init__(
        self, drafter: TreeDrafter, shape: TreeShape, sequences: int, vocab_size: int, exact: bool = False
    ) -> None:
        self.drafter, self.shape, self.name = drafter, drafter.limited(shape), drafter.name
        self.needs: FeatureRequest | None = drafter.needs
        self.readers: Sequence[KeepsFeatures] = _readers([drafter])
        self.reach, self.exact = drafter.reach(self.shape.levels), exact
        self._narrow = exact and drafter.vocabulary is not None
        with self._narrowed():
            columns = drafter.columns(vocab_size)
        self._plan = GrowthPlan(self.shape, sequences, drafter.device, drafter.free, columns)
        self._curves, levels, nodes = Curves(sequences, drafter.device), self.shape.levels, self.shape.nodes
        self._bars = WrittenBars(sequences, levels, drafter.device, nodes)
        self._bars.write([[ALWAYS] * levels] * sequences, [nodes] * sequences, [self._rows(self.shape)] * sequences)
        self._grown: dict[str, TreeBuilder] = {}

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
            return self.grown(state).tree()

    def grown(self, state: StepState) -> Growth:
        """Grow all levels."""
        growth = Growth(self._plan, state, self.drafter.token_ids, self._curves, self._bars)
        for _ in levels(growth, self.drafter):
            pass
        return growth

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """Update the drafter's stored state of the texts."""
        self.drafter.follow(state, taken, self.shape.levels)

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Compute what the first pass needs. False if it cannot draft for one of them."""
        for sequence in sequences:
            if not self.drafter.able(sequence):
                return False
            self.drafter.prepare(sequence, self.shape.levels)
        return True

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether it can draft this: a prefix of its shape; with a price, as many levels as are likely to be worth
        it."""
        return all(
            share.drafter == self.name and share.tree is None for share in scheduled.plan.shares
        ) and self.reaches(scheduled)

    def reaches(self, scheduled: ScheduledSequence) -> bool:
        """The same for only this drafter's part of the plan."""
        shape = self._planned(scheduled)
        if self.exact:
            fits = self.drafter.narrows(scheduled.sequence) == self._narrow
            return fits and shape.price is None and self.drafter.limited(shape) == self.shape
        if not shape.levels:
            return True
        levels = levels_ahead(shape)
        begins = self.drafter.limited(shape).limited(levels) == self.shape.limited(levels)
        return begins and levels <= self.shape.levels and (shape.price is None) == (self.shape.price is None)

    def _planned(self, scheduled: ScheduledSequence) -> TreeShape:
        shares = scheduled.plan.shares
        if not shares:
            return scheduled.shape or ROOT_ONLY
        return next((share.shape for share in shares if share.drafter == self.name and share.tree is None), ROOT_ONLY)

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Write how far each tree may grow, and the current calibration."""
        if self.exact and self.shape.is_chain:
            return
        calibration = self.drafter.calibration
        shapes = [self._planned(scheduled).limited(self.shape.levels) for scheduled in batch]
        kinds = [scheduled.sequence.sampling.kind for scheduled in batch]
        self._curves.write(calibration, kinds)
        bars = [
            [self._bar(*pair, depth) for depth in range(1, self.shape.levels)]
            for pair in zip(shapes, kinds, strict=True)
        ]
        counts = [self.shape.limited(shape.levels).nodes for shape in shapes]
        self._bars.write(bars, counts, [self._rows(shape) for shape in shapes])

    def _bar(self, shape: TreeShape, kind: int, depth: int) -> Bar:
        if depth >= shape.levels:
            return NEVER
        return ALWAYS if shape.price is None else shape.price.bar(self.drafter.calibration.first(kind, depth))

    @staticmethod
    def _rows(shape: TreeShape) -> Sequence[float]:
        """The cost of nodes; without a price, each one is worth it."""
        return [-float(nodes) for nodes in range(shape.nodes)] if shape.price is None else shape.price.rows

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """Add the chances of its nodes, which the calibration will learn from."""
        if self.shape.is_chain:
            chances = self.drafter.calibration.chain(sequence.sampling.kind, len(tree) - 1)
            return replace(tree, chances=(1.0, *chances))
        *parts, chosen = more
        grown = TreeBuilder(sequence, self.shape, self.drafter.calibration, None, tree.tokens[:1])
        grown.fixed = self._plan.levels
        each = len(parts) // len(grown.fixed)
        for level in (Level(*parts[first : first + each]) for first in range(0, len(parts), each)):
            grown.add(level.tokens[index].tolist(), level, index)
        grown.kept = [0, *(candidate + 1 for candidate in chosen[index, : len(tree) - 1].tolist())]
        self._grown[sequence.id] = grown
        return replace(tree, chances=tuple(math.exp(grown.scores[node]) for node in grown.kept), grown=grown.depth)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Set marks, and update the calibration."""
        self.drafter.collected(sequence, tree, path)
        self.drafter.said(sequence)
        if grown := self._grown.pop(sequence.id, None):
            grown.learn(path)
        else:
            _learn(self.drafter.calibration, sequence, tree, path)


class LookupHits:
    """Implements the same for the hits of lookups before the step, which the host writes. nodes: of the largest."""

    needs: FeatureRequest | None = None
    readers: Sequence[KeepsFeatures] = ()
    name = ""
    reach = 1

    def __init__(self, sequences: int, nodes: int, device: torch.device) -> None:
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

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """Nothing is stored."""

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """Nothing is needed."""
        return True

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether there is room for the hit; no draft at all is fine too."""
        shares = scheduled.plan.shares
        if not shares:
            return scheduled.shape is not None and not scheduled.shape.levels
        return len(shares) == 1 and shares[0].tree is not None and len(shares[0].tree) <= self.shape.nodes

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """The trees of the next step."""
        self._trees, to = [], self._staged.writable()
        for index, scheduled in enumerate(batch):
            found = [share.tree for share in scheduled.plan.shares if share.tree is not None]
            tree = (
                merge(found, scheduled.plan.shape.nodes).tree
                if found
                else DraftTree.chain(scheduled.sequence.tokens[-1:])
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

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Nothing to do: lookups read the text when they draft."""


class Together:
    """Implements the same for the hits of lookups and a growing tree, merged: common nodes belong to the lookups."""

    def __init__(self, found: LookupHits, drafts: Drafts) -> None:
        self.found, self.drafts, self.name = found, drafts, drafts.name
        self.needs, self.reach, self.readers = drafts.needs, drafts.reach, drafts.readers
        nodes, deep = found.shape.nodes + drafts.shape.nodes - 2, max(found.shape.levels, drafts.shape.levels)
        self.shape = TreeShape((1 + nodes - deep,) + (1,) * (deep - 1))
        self._own: dict[str, tuple[DraftTree, dict[int, int]]] = {}

    def propose(self, state: StepState) -> DeviceTree:
        """Grow the tree and merge both."""
        growth = self.drafts.grown(state)
        made = growth.cut()
        tree, rows, numbers = joined(self.found.propose(state), made, self.drafts.shape.levels)
        return replace(tree, rows=rows, more=(*growth.looked, made.candidates, numbers))

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """Update the drafter's stored state."""
        self.drafts.drafter.follow(state, taken, self.shape.levels)

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        """As the drafter does."""
        return self.drafts.prepare(sequences)

    def takes(self, scheduled: ScheduledSequence) -> bool:
        """Whether the plan has at most one hit, and a tree of this drafter."""
        found = [share.tree for share in scheduled.plan.shares if share.tree is not None]
        drafting = {share.drafter for share in scheduled.plan.shares if share.tree is None}
        fits = all(len(tree) <= self.found.shape.nodes for tree in found)
        return len(found) < 2 and fits and drafting <= {self.name} and self.drafts.reaches(scheduled)

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        """Write both."""
        self.found.write(batch)
        self.drafts.write(batch)

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        """Add each node's chance and the drafter that proposed it."""
        *looked, numbers = more
        mine = [number for number in numbers[index].tolist() if number < self.shape.nodes]
        node_of, found = (
            {number: node for node, number in enumerate(mine)},
            self.found.arrived(sequence, index, tree, ()),
        )
        tokens, parents = tree.tokens, tree.parents
        own = [-1, *(node_of[parents[number]] for number in mine[1:])]
        grown = DraftTree.build([tokens[number] for number in mine], own, self.name)
        grown = self.drafts.arrived(sequence, index, grown, looked)
        self._own[sequence.id] = grown, node_of
        theirs = found.sources or ("", *(found.drafter for _ in found.tokens[1:]))
        chances = [*found.chances, *[0.0] * (len(tree) - len(found.chances))]
        for number, chance in zip(mine, grown.chances, strict=True):
            chances[number] = max(chances[number], chance)
        return replace(
            tree,
            drafter=together(each.drafter for each in (found, grown) if len(each) > 1),
            chances=tuple(chances),
            sources=(*theirs, *(self.name for _ in range(len(tree) - len(found)))),
            parts=(*(found.parts or (found,)), grown),
        )

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """Passed to the drafter, in its own numbers."""
        grown, node_of = self._own.pop(sequence.id)
        self.drafts.collected(sequence, grown, own_path(path, node_of))


class ReadAlong:
    """Wraps another one, so that other drafters can read the features in its steps."""

    def __init__(self, inner: Proposer, readers: Sequence[HiddenStateDrafter]) -> None:
        self.inner, self._others = inner, readers
        self.readers: Sequence[KeepsFeatures] = [*inner.readers, *readers]
        self.name, self.shape, self.reach = inner.name, inner.shape, inner.reach
        self.needs = united([inner.needs, *(reader.needs for reader in readers)])
        self.propose, self.prepare, self.takes = inner.propose, inner.prepare, inner.takes
        self.write, self.arrived = inner.write, inner.arrived

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        """The other drafters store the features of the accepted paths."""
        self.inner.committed(state, taken)
        for reader in self._others:
            reader.follow(state, taken, self.shape.levels)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The features are stored."""
        self.inner.collected(sequence, tree, path)
        for reader in self._others:
            reader.stored(sequence, len(path))


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
    device, vocab_size = verifier.store.device, verifier.vocab_size
    shapes = planned_shapes if pinned is None else lambda most: [pinned.limited(most)]

    def made(size: int) -> list[Proposer]:
        proposers: list[Proposer] = [RootOnly(size, device)]
        proposers += [LookupHits(size, nodes, device) for nodes in _FOUND if looks]
        for model, most in models:
            proposers += [Drafts(model, shape, size, vocab_size) for shape in shapes(most)]
        if looks and pinned is None:
            trees = [one for one in proposers if isinstance(one, Drafts) and one.shape.price is not None]
            proposers += [Together(LookupHits(size, _WITH_TREE, device), tree) for tree in trees]
        return [_read_along(proposer, [model for model, _ in models]) for proposer in proposers]

    return made


def on_cpu(
    models: Sequence[tuple[TreeDrafter, int]], vocab_size: int, pinned: TreeShape | None = None
) -> list[Proposer]:
    """The proposers of steps that a CPU records whole: of one text that drafts a chain. None if the host is needed for
    a model's chains: others that draft for it would not be told what was committed. The rest as for :func:`by_plan`;
    pinned: the shape of every draft."""
    known = [model for model, _ in models]
    if any(model.staged for model in known):
        return []
    shapes = [TreeShape.chain(levels) for levels in range(1, WHOLE_CHAIN + 1)] if pinned is None else [pinned]
    return [
        _read_along(Drafts(model, shape, 1, vocab_size, exact=True), known)
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


def _read_along(proposer: Proposer, models: Sequence[TreeDrafter]) -> Proposer:
    readers = [model for model in _readers(models) if model.name != proposer.name]
    return ReadAlong(proposer, readers) if readers else proposer


def on_device(drafter: Drafter | None) -> TreeDrafter | None:
    """The drafter, if it can be captured with the step; None if it drafts on the host, or there is none."""
    return drafter if isinstance(drafter, TreeDrafter) else None


def _learn(calibration: Calibration, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
    """Learn whether each level of a chain was accepted. Chances of static trees stay on the device, so nothing is
    learnt from them.

    path: nodes of the tree that were committed, their samples already in the sequence's tokens.
    """
    if not tree.is_chain:
        return
    sampled = sequence.tokens[len(sequence.tokens) - len(path) :]
    kind, drafted = sequence.sampling.kind, tree.tokens[1:]
    for depth, (token, draft) in enumerate(zip(sampled, drafted, strict=False)):
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
