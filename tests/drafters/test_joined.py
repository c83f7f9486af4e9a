"""Found nodes and those of a tree are merged on the device as on the host."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from foresay.drafters.proposer import joined
from foresay.spec.tree import DraftTree, merge
from foresay.verifier.forward_batch import signed
from foresay.verifier.graphs.proposer import DeviceTree
from tests.spec.trees import paths, random_tree


def test_found_nodes_and_those_of_a_tree_are_joined_as_the_host_merges_them() -> None:
    rng, shared = random.Random(3), 0
    for _ in range(20):
        pairs = [tuple(random_tree(rng, rng.randint(1, most), 3, root=1) for most in (9, 12)) for _ in range(3)]
        found, tree = (padded([pair[which] for pair in pairs], width) for which, width in ((0, 9), (1, 12)))
        rows = torch.arange(12).expand(3, -1)
        made = joined(found, replace(tree, rows=rows), 11)
        assert made.rows is not None
        for index, (theirs, ours) in enumerate(pairs):
            size, both = int(made.counts[index]), merge([theirs, ours])
            assert made.tokens[index, :size].tolist() == both.tokens
            assert made.parents[index, :size].tolist() == both.parents
            assert made.ancestors[index, :size].tolist() == signed(both.ancestors).tolist()
            assert made.depths[index, :size].tolist() == both.depths
            second = paths(ours)
            own = [second.index(each) if each in second else -1 for each in paths(both)]
            assert made.rows[index, :size].tolist() == own
            shared += len(theirs) + len(ours) - 1 - size
    assert shared > 10


def padded(trees: list[DraftTree], width: int) -> DeviceTree:
    """What is behind a tree is anything."""
    columns = {name: torch.randint(0, 3, (len(trees), width)) for name in ("tokens", "parents", "ancestors", "depths")}
    for row, tree in enumerate(trees):
        for name, column in columns.items():
            column[row, : len(tree)] = torch.as_tensor(getattr(tree, name))
    counts = torch.tensor([len(tree) for tree in trees])
    return DeviceTree(
        columns["tokens"], columns["parents"], columns["ancestors"], columns["depths"].int(), counts, False
    )
