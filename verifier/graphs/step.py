"""One speculative step as a function of static tensors: what a graph captures.

::

    propose     the proposer's trees below the roots                        its own passes, if it is a model
    forward     one pass of the target over all nodes of all sequences
    draw        at every node; accept; rows of accepted nodes move down
    committed   the proposer's caches follow; the state becomes that of the next step
    out         what the host wants to know, in one tensor

Nothing here reads a number on the host, so the next step can be launched before this one is done.

Legend: S sequences, N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spec.tree import DraftTree
from verifier.graphs.proposer import DeviceTree, Proposer, Taken
from verifier.graphs.rows import Nodes, rows_of
from verifier.graphs.state import StepState
from verifier.model.paged_pass import paged_pass
from verifier.ops.accept import accept_paths
from verifier.ops.draw import RowSampling, draw_rows
from verifier.ops.move import move_paths
from verifier.paged_model import PagedModel


class Drawing(Protocol):
    """Draws at every node; benchmarks put a recorded acceptance in its place."""

    def __call__(self, logits: Tensor, sampling: RowSampling, tree: DeviceTree) -> Tensor:
        """int64[S, N]. logits: fp32[S * N, V]."""
        ...


def drawn_tokens(logits: Tensor, sampling: RowSampling, tree: DeviceTree) -> Tensor:
    """int64[S, N]: the draw at every node."""
    return draw_rows(logits, sampling).view_as(tree.tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the host reads of a step, int64[S, 1 + 3 N]: path length, tokens, parents and draws of each sequence."""

    table: Tensor

    @property
    def rows(self) -> list[int]:
        """How many rows of each sequence became text."""
        lengths: list[int] = self.table[:, 0].tolist()
        return lengths

    def of(self, index: int, drafter: str) -> tuple[DraftTree, Tensor]:
        """One sequence's tree, and int64[N], the draws at its nodes."""
        rest = self.table[index, 1:].tolist()
        count = len(rest) // 3
        tokens, parents, drawn = rest[:count], rest[count : 2 * count], rest[2 * count :]
        nodes = count - parents.count(_NO_NODE)
        tree = DraftTree.build(tokens[:nodes], parents[:nodes], drafter)
        return tree, torch.tensor(drawn[:nodes])


#: In the place of a parent where there is no node.
_NO_NODE = -2


class SpeculativeStep:
    """The step of one bucket. Calling it launches the step on the current stream; ``out`` is then its outcome."""

    def __init__(self, model: PagedModel, proposer: Proposer, state: StepState, draw: Drawing = drawn_tokens) -> None:
        self.model, self.proposer, self.state = model, proposer, state
        self._draw = draw
        nodes = proposer.shape.nodes
        self._order = torch.arange(nodes, device=state.device)
        self._numbers = self._order.expand(state.size, nodes).contiguous()
        self.out = torch.zeros(state.size, 1 + 3 * nodes, dtype=torch.int64, device=state.device)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Launch it."""
        state, store = self.state, self.model.store
        tree = self.proposer.propose(state)
        rows, slots = rows_of(state, Nodes(tree.tokens, self._numbers, tree.ancestors, tree.depths))
        logits, features = paged_pass(self.model.decoder, rows, store, self.proposer.needs)
        drawn = self._draw(logits, state.sampling(tree.depths), tree)
        paths = accept_paths(tree.tokens, tree.parents, tree.ancestors, drawn, tree.counts * state.live, slots)
        if not tree.chain:
            move_paths(store.keys, store.values, paths.sources, slots, paths.lengths)
        self.proposer.committed(state, Taken(tree, paths, slots, features))
        parents = tree.parents.where(self._order < tree.counts[:, None], _NO_NODE)
        self.out.copy_(torch.cat((paths.lengths[:, None], tree.tokens, parents, drawn), dim=1))
        state.advance(paths)
