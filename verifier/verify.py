"""What follows a sample: paths are accepted, and their rows move down.

Trees are laid out as in a captured step, each in a row as wide as the largest tree.

Legend: B sequences of a pass, W of its rows whose logits are wanted, N nodes of the largest tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.graphs.proposer import DeviceTree
from foresay.verifier.ops.records import AcceptedPaths
from foresay.verifier.ops.rows import take_rows
from foresay.verifier.ops.trees import accept_paths, move_paths
from foresay.verifier.paged_rows import ForwardBatch, StaticRows


def verify(store: KVStore, rows: StaticRows, sampled: Tensor, batch: ForwardBatch) -> Tensor:
    """Accept and move. sampled: int64[W], from each wanted row. Returns int64[B, 1 + 2 N], which the host reads: how
    long each path is, the path, the sample at each node."""
    assert rows.wanted is not None, "logits are those of rows"
    parents, places, nodes = (batch.tensors[name] for name in ("parents", "places", "nodes"))

    def of_nodes(column: Tensor, places: Tensor) -> Tensor:
        return take_rows(column, places.flatten()).view_as(parents)

    at_nodes, numbers = of_nodes(sampled, places), of_nodes(rows.wanted, places)
    slots = [each.slots for each in (rows, rows.windowed) if each is not None]
    columns = rows.tokens, batch.tensors["words"], *slots
    tokens, words, own, *windowed = (of_nodes(column, numbers) for column in columns)
    no_depths = nodes  # nothing here reads any
    tree = DeviceTree(tokens, parents, words, no_depths, nodes, chain=False)
    paths = accept_and_move(store, tree, at_nodes, own, None, *windowed)
    return torch.cat((paths.lengths[:, None], paths.paths, at_nodes), dim=1)


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
