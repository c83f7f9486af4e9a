"""One speculative step as a function of static tensors: what a graph captures.

::

    propose     the proposer's trees below the roots                        its own passes, if it is a model
    forward     one pass of the target over all nodes of all sequences
    sample      at every node; accept; rows of accepted nodes move down, and their records advance recurrent states
    committed   the proposer's caches are updated; the state becomes that of the next step
    out         the outcome for the host, in one tensor

Nothing here reads a number on the host, so the next step can be launched before this one has finished.

Legend: S sequences, N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foresay.spec.protocols import Features, Verified
from foresay.spec.tree import DraftTree
from foresay.verifier.graphs.capture import Arrival, fetched, packed, unpacked
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, Proposer
from foresay.verifier.graphs.rows import Nodes, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model.forward import forward
from foresay.verifier.model_runner import ModelRunner, accept_and_move
from foresay.verifier.ops.records import RowSampling
from foresay.verifier.ops.recurrence import replay_paths
from foresay.verifier.ops.sample import sample_rows
from foresay.verifier.ops.trees import real_parents, report


class Drawing(Protocol):
    """Samples at every node; benchmarks replace it with recorded acceptance."""

    def __call__(self, logits: Tensor, sampling: RowSampling, tree: DeviceTree) -> Tensor:
        """int64[S, N]. logits: fp32[S * N, V]."""
        ...


def sampled_ids(logits: Tensor, sampling: RowSampling, tree: DeviceTree) -> Tensor:
    """int64[S, N]: the sample at every node."""
    return sample_rows(logits, sampling).view_as(tree.tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's outcome for the host. table: int64[S, 1 + 4 N], for each sequence path length, path, tokens, parents,
    samples. more: see :class:`~foresay.verifier.graphs.proposer.DeviceTree`."""

    table: Tensor
    more: Sequence[Tensor] = ()

    @property
    def rows(self) -> list[int]:
        """How many rows of each sequence became text."""
        lengths: list[int] = self.table[:, 0].tolist()
        return lengths

    def of(self, index: int, drafter: str) -> tuple[DraftTree, Verified]:
        """One sequence's tree, with its samples and accepted path."""
        length, *rest = self.table[index].tolist()
        count = len(rest) // 4
        path, tokens, parents, sampled = (rest[first : first + count] for first in range(0, 4 * count, count))
        tree = _tree(tokens, parents, drafter)
        return tree, (sampled[: len(tree)], path[:length])


def seen(row: Tensor, drafter: str) -> DraftTree:
    """The tree of a sequence at the stop. row: int64[2 N], tokens and parents."""
    tokens, parents = row.view(2, -1).tolist()
    return _tree(tokens, parents, drafter)


def _tree(tokens: list[int], parents: list[int], drafter: str) -> DraftTree:
    nodes = len(parents) - parents.count(_NO_NODE)
    return DraftTree.build(tokens[:nodes], parents[:nodes], drafter)


#: The parent of entries that are not nodes.
_NO_NODE = -2


@dataclass(frozen=True, slots=True)
class _Passed:
    """The state at the stop: trees, their slots (windowed: in window pages), and the target's results for them."""

    tree: DeviceTree
    slots: Tensor
    windowed: Tensor | None
    logits: Tensor
    features: Features


class SpeculativeStep:
    """The step of one bucket. Calling it launches the step on the current stream; the outcome is then in ``out``.

    Where a request changes or reads its logits, it is launched in :meth:`with_stop`: at the stop ``seen`` holds the
    trees (int64[S, 2 N]: tokens, parents), and tokens are sampled from what is then in the first rows of ``logits``,
    which many steps may share. logits: fp32[M, V]; None where it is always launched whole. commits: whether accepted
    paths advance recurrent states.
    """

    def __init__(
        self,
        model: ModelRunner,
        proposer: Proposer,
        state: StepState,
        sample: Drawing = sampled_ids,
        logits: Tensor | None = None,
        commits: bool = True,
    ) -> None:
        self.model, self.proposer, self.state, self._commits = model, proposer, state, commits
        self._sample, self.logits = sample, logits
        nodes, device = proposer.shape.nodes, state.device
        self._numbers = torch.arange(nodes).to(device).expand(state.size, nodes).contiguous()
        self._whole = self.out = torch.zeros(state.size, 1 + 4 * nodes, dtype=torch.int64, device=device)
        self._parts: tuple[Tensor, ...] = (self.out,)
        self.seen = torch.zeros(state.size, 2 * nodes, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Launch it whole."""
        self._verify(self._forward())

    def with_stop(self) -> Iterator[None]:
        """Launch it with a stop after the pass."""
        assert self.logits is not None, "they have a place of their own"
        with torch.inference_mode():
            passed = self._forward()
            kept = self.logits[: len(passed.logits)].copy_(passed.logits)
            passed = replace(passed, logits=kept)
            parents = real_parents(passed.tree.parents, passed.tree.counts, _NO_NODE)
            self.seen.copy_(torch.cat((passed.tree.tokens, parents), dim=1))
        yield
        with torch.inference_mode():
            self._verify(passed)
        yield

    def _forward(self) -> _Passed:
        tree = self.proposer.propose(self.state)
        nodes, windowed = Nodes(tree.tokens, self._numbers, tree.ancestors, tree.depths), None
        rows, slots = rows_of(self.state, nodes, live=self.state.states is not None)
        if self.state.window_tables is not None:
            same, windowed = rows_of(self.state, nodes, tables=self.state.window_tables)
            rows = replace(rows, windowed=same)
        if self.state.states is not None:
            rows = self.state.states.with_states(rows)
        logits, features = forward(self.model.decoder, rows, self.model.store, self.proposer.needs)
        return _Passed(tree, slots, windowed, logits, features)

    def _verify(self, passed: _Passed) -> None:
        state, store, tree, slots = self.state, self.model.store, passed.tree, passed.slots
        sampled = self._sample(passed.logits, state.sampling(tree.depths), tree)
        paths = accept_and_move(store, tree, sampled, slots, state.live, passed.windowed)
        if store.states is not None and state.states is not None and self._commits:
            of = state.states.targets, state.lengths, paths.lengths, paths.paths
            replay_paths(store.states.layers, *of, state.page_size)
        self.proposer.committed(state, AcceptedTree(tree, paths, slots, passed.features))
        report(paths, tree.tokens, tree.parents, tree.counts, sampled, self.out, _NO_NODE)
        if tree.more:
            self._pack((self.out, *tree.more))
        state.advance(paths)

    def _pack(self, parts: tuple[Tensor, ...]) -> None:
        """Write everything that the host needs of the step into one tensor."""
        whole, self._parts = packed(parts), parts
        if self._whole is self.out:  # in the very first run
            self._whole = torch.zeros_like(whole)
        self._whole.copy_(whole)

    def fetched(self) -> Arrival:
        """Start to copy the outcome to the host, after the step itself."""
        return fetched(self._whole)

    def outcome(self, whole: Tensor) -> Outcome:
        """The outcome that arrived."""
        if len(self._parts) == 1:
            return Outcome(whole)
        table, *more = unpacked(whole, self._parts)
        return Outcome(table, more)
