"""What follows a pass: a token is sampled from each of its logits, paths are accepted, and their rows move down.

Trees stand here as a captured step has them, each in a row as wide as the largest tree; the host writes them, and how
tokens are sampled. On a CPU that is recorded once behind a pass, and replayed for any trees.

Legend: B sequences of a pass, W of its rows whose logits are wanted, N nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.accept import Acceptance
from foresay.spec.protocols import Sampled
from foresay.spec.sample import Unsampled
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.graphs.capture import on_host
from foresay.verifier.graphs.proposer import DeviceTree
from foresay.verifier.ops.accept import accept_paths
from foresay.verifier.ops.move import move_paths
from foresay.verifier.ops.records import SAMPLING, AcceptedPaths, RowSampling, SamplingColumns
from foresay.verifier.ops.take import take_rows
from foresay.verifier.paged_rows import StaticRows
from foresay.verifier.staged import Column, Staged


class WrittenTrees:
    """The trees of a step and how they are sampled, as the host writes them.

    tree: N is as large as a tree can be. places: int64[B, N], which of the wanted rows each node is. sampling: of the
    wanted rows; rows: int64[1], how many those are.
    """

    def __init__(self, sequences: int, rows: int, device: torch.device) -> None:
        each = (sequences, MAX_NODES)
        columns: dict[str, Column] = dict.fromkeys(("tokens", "parents", "words", "places"), (each, torch.int64))
        columns |= {"depths": (each, torch.int32), "counts": ((sequences,), torch.int64), "rows": ((1,), torch.int64)}
        columns |= {name: ((rows,), dtype) for name, dtype in SAMPLING.items()}
        self._staged = Staged(device, columns)
        there, arrays = self._staged.tensors, self._staged.arrays
        self.tree = DeviceTree(
            there["tokens"], there["parents"], there["words"], there["depths"], there["counts"], chain=False
        )
        self.places, self.rows = there["places"], there["rows"]
        self.sampling = RowSampling(*(there[name] for name in SAMPLING))
        self._columns = SamplingColumns(*(arrays[name] for name in SAMPLING))

    def write(self, trees: Sequence[Unsampled | None], ends: Sequence[int]) -> bool:
        """The trees of the next replay; returns whether any is more than its root: of roots nothing has to be walked.

        ends: where the wanted rows of each sequence end.
        """
        drafted = any(each is not None and len(each.positions) > 1 for each in trees)
        to = self._staged.writable()
        to["counts"][:] = 0  # those of sequences that are not there
        for index, (each, end) in enumerate(zip(trees, ends, strict=True)):
            if each is not None:
                begin = end - len(each.positions)
                self._columns.write(slice(begin, end), each.sampling, each.noise.seed, each.positions)
            if drafted:
                self._write_tree(index, None if each is None else each.tree, end)
        to["rows"][0] = ends[-1]
        self._staged.send()
        return drafted

    def _write_tree(self, index: int, tree: DraftTree | None, end: int) -> None:
        to = self._staged.arrays
        to["counts"][index] = count = 0 if tree is None else len(tree)
        if tree is not None:
            columns = {"tokens": tree.tokens, "parents": tree.parents, "words": tree.ancestors}
            for name, column in columns.items():
                to[name][index, :count] = column.numpy()
            to["places"][index, :count] = np.arange(end - count, end)


@dataclass(frozen=True, slots=True)
class Settled:
    """sampled: int64[B, N], the token sampled at each node."""

    sampled: Tensor
    paths: AcceptedPaths

    def on_host(self, trees: Sequence[Unsampled | None]) -> list[Sampled | None]:
        """What of it is each tree's."""
        parts = (self.paths.lengths, self.sampled, self.paths.paths, self.paths.emitted)
        lengths, sampled, paths, emitted = (part.numpy() for part in on_host(parts))
        return [
            None
            if each is None
            else Sampled(
                torch.from_numpy(sampled[index, : len(each.positions)].copy()),
                Acceptance(paths[index, : lengths[index]].tolist(), emitted[index, : lengths[index]].tolist()),
            )
            for index, each in enumerate(trees)
        ]


def walk(store: KVStore, rows: StaticRows, sampled: Tensor, written: WrittenTrees) -> Settled:
    """Accept and move. sampled: int64[W], from each wanted row."""
    assert rows.wanted is not None, "logits are those of rows"
    tree, places = written.tree, written.places.flatten()
    at_nodes = take_rows(sampled, places).view_as(tree.tokens)
    wanted = take_rows(rows.wanted, places)
    kept = [rows] if rows.windowed is None else [rows, rows.windowed]
    slots, *windowed = (take_rows(each.slots, wanted).view_as(tree.tokens) for each in kept)
    return Settled(at_nodes, accept_and_move(store, tree, at_nodes, slots, None, *windowed))


def of_roots(sampled: Tensor, trees: Sequence[Unsampled | None], ends: Sequence[int]) -> list[Sampled | None]:
    """What of the samples is each tree's, all of which are roots alone. sampled: int64[W], on the host."""
    return [
        None if each is None else Sampled(sampled[end - 1 : end].clone(), Acceptance([0], [int(sampled[end - 1])]))
        for each, end in zip(trees, ends, strict=True)
    ]


def accept_and_move(
    store: KVStore,
    tree: DeviceTree,
    sampled: Tensor,
    slots: Tensor,
    live: Tensor | None = None,
    windowed: Tensor | None = None,
) -> AcceptedPaths:
    """The paths that the samples take; their rows move down. sampled, slots: int64[B, N], of each node; windowed: the
    slots where layers with window pages keep them. live: int32[B], 0 where nothing is sampled."""

    def accepted(slots: Tensor) -> AcceptedPaths:
        return accept_paths(tree.tokens, tree.parents, tree.ancestors, sampled, tree.counts, slots, live)

    paths = accepted(slots)
    if not tree.chain:
        sources = {False: (paths.sources, slots)}
        if windowed is not None:
            sources[True] = (accepted(windowed).sources, windowed)
        for arrays in store.arrays:
            move_paths(arrays.parts, *sources[arrays.windows is not None], paths.lengths)
    return paths
