"""Batched attention as it is compiled against its reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.tree import DraftTree
from foresay.verifier.forward_batch import signed
from foresay.verifier.model.config import KVShape
from foresay.verifier.ops.attention import tree_attention
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import AttentionMetadata
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
    for part in store.tensors:
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
    rows = AttentionMetadata(
        tables=torch.tensor([(table.pages + [0] * 8)[:8] for table in tables], dtype=torch.int32),
        page_size=SIZE,
        lengths=torch.tensor([length for length, _ in sequences], dtype=torch.int32),
        offsets=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
    )
    if kind != "chunks":
        rows.words = torch.tensor([*(word for tree in trees for word in signed(tree.ancestors)), 0, 0])
        rows.depths = torch.tensor([*(depth for tree in trees for depth in tree.depths), 0, 0], dtype=torch.int32)
    if kind == "both":
        rows.is_prefill = torch.tensor([0, 1, 0], dtype=torch.int32)
    result = tree_attention(query, *store.layer(0)[:2], rows, SCALE, window, first)
    with references():
        wanted = tree_attention(query, *store.layer(0)[:2], rows, SCALE, window, first)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    assert not result[sum(counts) :].any()


@pytest.mark.parametrize("computed", [nullcontext, references], ids=["compiled", "reference"])
def test_scores_are_capped_and_a_sink_takes_its_share(computed: Callable[[], AbstractContextManager[None]]) -> None:
    """Two heads over three keys, every number written out; a row that sees no key gives zeros."""
    page, offsets = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    rows = AttentionMetadata(page[None], 4, page, offsets)
    query = torch.tensor([[[9.0], [-9.0]]] * 3).repeat_interleave(WIDTH, dim=2)
    keys, values = (
        torch.tensor([*numbers, torch.nan])[:, None, None].repeat(1, 1, WIDTH)
        for numbers in ((1.0, 0.5, -1.0), (1.0, 10.0, 100.0))
    )
    sinks = torch.tensor([1.5, -2.0])
    scores = 2.0 * (torch.tensor([[6.0, 3.0, -6.0], [-6.0, -3.0, 6.0]]) / 2.0).tanh()
    weights = torch.cat([scores, sinks[:, None]], dim=1).exp()
    wanted = (weights[:, :3] * torch.tensor([1.0, 10.0, 100.0])).sum(dim=1) / weights.sum(dim=1)
    scale = 6.0 / 9.0 / WIDTH
    with computed():
        found = tree_attention(query, keys, values, rows, scale, softcap=2.0, sinks=sinks)
        rows.plan = None
        late = tree_attention(query, keys, values, rows, scale, first=2, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(found[2], wanted[:, None].expand(-1, WIDTH), rtol=1e-6, atol=0)
    assert late[2].all() and not late[:2].any()
