"""Batched attention as it is compiled against its reference."""

from __future__ import annotations

import random

import pytest
import torch

from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.tree import DraftTree
from foresay.verifier.model.sizes import KVShape
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.tree_attention import PagedRows, tree_attention
from tests.verifier.reading import random_parents, scattered

SCALE = 0.3
HEADS, GROUPS, WIDTH, SIZE = 6, 2, 16, 16


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["trees", "chunks", "both"])
def test_it_is_what_the_reference_says(kind, window, first) -> None:
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    pool = PagePool(40, SIZE)
    store = KVStore(pool, [KVShape(GROUPS, WIDTH, WIDTH)], torch.float32)
    scattered(pool)
    for part in store.parts:
        part.normal_(generator=generator)
    sequences = [(0, 1), (37, 9), (100, 5)]
    counts = [nodes for _, nodes in sequences]
    query = torch.randn(sum(counts) + 2, HEADS, WIDTH, generator=generator)
    tables, trees = [], []
    for length, nodes in sequences:
        tables.append(PageTable(pool))
        tables[-1].reserve(length + nodes)
        tables[-1].commit(length)
        trees.append(DraftTree.build([0] * nodes, random_parents(rng, nodes, 4)))
    rows = PagedRows(
        tables=torch.tensor([(table.pages + [0] * 8)[:8] for table in tables], dtype=torch.int32),
        page_size=SIZE,
        lengths=torch.tensor([length for length, _ in sequences], dtype=torch.int32),
        offsets=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
    )
    if kind != "chunks":
        rows.words = torch.cat([*(tree.ancestors for tree in trees), torch.zeros(2, dtype=torch.int64)])
        rows.depths = torch.cat([*(tree.depths for tree in trees), torch.zeros(2, dtype=torch.int64)]).int()
    if kind == "both":
        rows.texts = torch.tensor([0, 1, 0], dtype=torch.int32)
    result = tree_attention(query, *store.layer(0)[:2], rows, SCALE, window, first)
    with references():
        wanted = tree_attention(query, *store.layer(0)[:2], rows, SCALE, window, first)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    assert not result[sum(counts) :].any()
