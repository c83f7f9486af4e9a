"""The reference of batched attention against the op the eager step uses."""

from __future__ import annotations

import random

import pytest
import torch

from kvpaging import KVStore, PagePool, PageTable
from spec.protocols import Rows
from spec.tree import DraftTree
from tests.verifier.reading import random_parents, scattered
from verifier.batch import ForwardBatch, Segment
from verifier.ops.attention import attend
from verifier.ops.tree_attention import PagedRows, tree_attention

SCALE = 0.3
HEADS, GROUPS, WIDTH, SIZE = 6, 2, 16, 16


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["trees", "chunks"])
def test_it_is_the_attention_of_the_eager_step(kind, window, first) -> None:
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    pool = PagePool(40, SIZE)
    store = KVStore(pool, 1, GROUPS, WIDTH, torch.float32)
    scattered(pool)
    store.keys.normal_(generator=generator)
    store.values.normal_(generator=generator)
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
    if kind == "trees":
        parts = [Rows.of_tree(table, tree) for table, tree in zip(tables, trees, strict=True)]
        rows.words = torch.cat([*(tree.ancestors for tree in trees), torch.zeros(2, dtype=torch.int64)])
        rows.depths = torch.cat([*(tree.depths for tree in trees), torch.zeros(2, dtype=torch.int64)]).int()
    else:
        parts = [Rows(t, torch.zeros(n, dtype=torch.int64), b) for t, (b, n) in zip(tables, sequences, strict=True)]
    result = tree_attention(query, store.keys[0], store.values[0], rows, SCALE, window, first)
    for segment in ForwardBatch.build(parts, HEADS // GROUPS, window).segments:
        assert isinstance(segment, Segment)
        segment.first = first
        wanted = attend(query[segment.rows], store.keys[0], store.values[0], segment, SCALE, window is not None)
        seen = slice(1, None) if first and segment.used == 1 else slice(None)  # a lone row at 0 would see nothing
        assert torch.allclose(result[segment.rows].flatten(1)[seen], wanted[seen], atol=1e-5)
    assert not result[sum(counts) :].any()
