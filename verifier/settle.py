"""What follows a pass: a token is drawn from each of its logits, paths are accepted, and their rows move down.

Trees stand here as a captured step has them, each in a row as wide as the largest tree; the host writes them, and how
tokens are drawn. On a CPU that is recorded once behind a pass, and replayed for any trees.

Legend: B sequences of a pass, W of its rows whose logits are wanted, N nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpaging import KVStore
from spec.accept import Acceptance
from spec.draw import Undrawn
from spec.protocols import Drawn
from spec.sampling import SamplingParams
from spec.tree import MAX_NODES, DraftTree
from verifier.graphs.proposer import DeviceTree
from verifier.ops.accept import AcceptedPaths, accept_paths
from verifier.ops.draw import RowSampling, draw_rows
from verifier.ops.move import move_paths
from verifier.ops.take import take_rows
from verifier.paged_rows import StaticRows


class WrittenTrees:
    """The trees of a step and how they are drawn, as the host writes them.

    tree: N is as large as a tree can be. places: int64[B, N], which of the wanted rows each node is. sampling: of the
    wanted rows; rows: int64[1], how many those are.
    """

    def __init__(self, sequences: int, rows: int) -> None:
        tokens, parents, words, places = torch.zeros(4, sequences, MAX_NODES, dtype=torch.int64)
        counts, depths = torch.zeros(sequences, dtype=torch.int64), torch.zeros(sequences, MAX_NODES, dtype=torch.int32)
        self.tree = DeviceTree(tokens, parents, words, depths, counts, False)
        self.places, self.rows = places, torch.zeros(1, dtype=torch.int64)
        self.sampling = RowSampling.of([SamplingParams()] * rows, [0] * rows, [0] * rows)
        self._arrays = [each.numpy() for each in (tokens, parents, words, places, counts)]
        self._columns = self.sampling.columns()

    def write(self, trees: Many[Undrawn | None], ends: Many[int]) -> bool:
        """The trees of the next replay; returns whether any is more than its root: of roots nothing has to be walked.

        ends: where the wanted rows of each sequence end.
        """
        drafted = any(each is not None and len(each.positions) > 1 for each in trees)
        self._arrays[-1][:] = 0  # those of sequences that are not there
        for index, (each, end) in enumerate(zip(trees, ends, strict=True)):
            if each is not None:
                begin = end - len(each.positions)
                self._columns.write(slice(begin, end), each.sampling, each.noise.seed, each.positions)
            if drafted:
                self._write_tree(index, None if each is None else each.tree, end)
        self.rows[0] = ends[-1]
        return drafted

    def _write_tree(self, index: int, tree: DraftTree | None, end: int) -> None:
        tokens, parents, words, places, counts = self._arrays
        counts[index] = count = 0 if tree is None else len(tree)
        if tree is not None:
            tokens[index, :count], parents[index, :count] = tree.tokens.numpy(), tree.parents.numpy()
            words[index, :count], places[index, :count] = tree.ancestors.numpy(), np.arange(end - count, end)

    def move(self, device: torch.device) -> None:
        """To where the pass was; nothing is written to it then."""
        tree = self.tree
        columns = (tree.tokens, tree.parents, tree.ancestors, tree.depths, tree.counts, self.places, self.rows)
        tokens, parents, words, depths, counts, self.places, self.rows = (each.to(device) for each in columns)
        self.tree, self.sampling = DeviceTree(tokens, parents, words, depths, counts, False), self.sampling.to(device)


@dataclass(frozen=True, slots=True)
class Settled:
    """drawn: int64[B, N], the token drawn at each node."""

    drawn: Tensor
    paths: AcceptedPaths

    def on_host(self, trees: Many[Undrawn | None]) -> list[Drawn | None]:
        """What of it is each tree's."""
        parts = (self.paths.lengths, self.drawn, self.paths.paths, self.paths.emitted)
        lengths, drawn, paths, emitted = (part.cpu().numpy() for part in parts)
        return [
            None
            if each is None
            else Drawn(
                torch.from_numpy(drawn[index, : len(each.positions)].copy()),
                Acceptance(paths[index, : lengths[index]].tolist(), emitted[index, : lengths[index]].tolist()),
            )
            for index, each in enumerate(trees)
        ]


def settle(store: KVStore, rows: StaticRows, logits: Tensor, written: WrittenTrees) -> Settled:
    """Draw, accept and move. logits: fp32[W, V], of the pass over ``rows``."""
    return walk(store, rows, draw_rows(logits, written.sampling, None, written.rows), written)


def walk(store: KVStore, rows: StaticRows, drawn: Tensor, written: WrittenTrees) -> Settled:
    """Accept and move. drawn: int64[W], from each wanted row."""
    assert rows.wanted is not None, "logits are those of rows"
    tree, places = written.tree, written.places.flatten()
    at_nodes = take_rows(drawn, places).view_as(tree.tokens)
    slots = take_rows(rows.slots, take_rows(rows.wanted, places)).view_as(tree.tokens)
    return Settled(at_nodes, accept_and_move(store, tree, at_nodes, slots, tree.counts))


def of_roots(drawn: Tensor, trees: Many[Undrawn | None], ends: Many[int]) -> list[Drawn | None]:
    """What of the draws is each tree's, all of which are roots alone. drawn: int64[W], on the host."""
    return [
        None if each is None else Drawn(drawn[end - 1 : end].clone(), Acceptance([0], [int(drawn[end - 1])]))
        for each, end in zip(trees, ends, strict=True)
    ]


def accept_and_move(store: KVStore, tree: DeviceTree, drawn: Tensor, slots: Tensor, counts: Tensor) -> AcceptedPaths:
    """The paths that the draws take; their rows move down. drawn, slots: int64[B, N], of each node. counts: int64[B],
    the nodes of each tree, 0 where nothing is drawn."""
    paths = accept_paths(tree.tokens, tree.parents, tree.ancestors, drawn, counts, slots)
    if not tree.chain:
        move_paths(store.keys, store.values, paths.sources, slots, paths.lengths)
    return paths
