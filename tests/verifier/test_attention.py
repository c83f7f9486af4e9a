"""The attention op against its definition, and a row's bits in chunks (in trees: test_attention_company.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.spec.tree import DraftTree
from foresay.verifier.forward_batch import ForwardBatch
from foresay.verifier.model.config import KVShape
from foresay.verifier.model.forward import attended
from foresay.verifier.model.layers import Attention
from tests.poison import poison_store
from tests.verifier.reading import random_parents, scattered, threads

SCALE = 0.3


@dataclass
class Bench:
    """One layer's keys and values. G kv heads, ``group`` query heads for each, D wide."""

    groups: int = 2
    group: int = 2
    width: int = 16
    page_size: int = 16
    window: int | None = None
    scatter: bool = False
    dtype: torch.dtype = torch.float32
    pages: int = 16
    seed: int = 0
    store: KVStore = field(init=False, repr=False)

    def __str__(self) -> str:
        grouping = f"{self.groups}x{self.group}x{self.width}"
        kind = str(self.dtype).removeprefix("torch.") + ("-scattered" if self.scatter else "")
        return f"{grouping}-page{self.page_size}-window{self.window}-{kind}"

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.pool = PagePool(1 + self.pages * (2 if self.scatter else 1), self.page_size)
        self.store = KVStore(self.pool, [KVShape(self.groups, self.width, self.width)], self.dtype)
        if self.scatter:
            scattered(self.pool)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def text(self, keys: Tensor, values: Tensor) -> PageTable:
        """A table that holds these rows, all NaN behind them; nothing is committed yet."""
        table = PageTable(self.pool)
        table.reserve(len(keys))
        poison_store(self.store)
        slots = table.slots(0, len(keys))
        for part, rows in zip(self.store.tensors, (keys, values), strict=True):
            part[0, slots] = rows
        return table

    def attend(self, rows: Rows, query: Tensor) -> Tensor:
        static = ForwardBatch.of([rows], query.device)
        node = Attention(query.shape[1], self.groups, self.width, SCALE, None, window=self.window)
        return attended(query, self.store.layer(0), static, node, None)

    def row_alone(self, keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        """One query at the end of contiguous text that is committed but for its own key."""
        table = self.text(keys, values)
        result = self.attend(Rows(table, torch.zeros(1, dtype=torch.int64), len(keys) - 1), query[None])[0]
        table.release()
        return result

    def tree(self, nodes: int, reach: int) -> DraftTree:
        return DraftTree.build([0] * nodes, random_parents(self.rng, nodes, reach))


def paths_of(tree: DraftTree) -> list[list[int]]:
    return [[node for node in range(len(tree)) if word >> node & 1] for word in tree.ancestors]


def definition(query: Tensor, keys: Tensor, values: Tensor, group: int, window: int | None) -> Tensor:
    """float64[H * D]: softmax attention of the last of these rows, its keys in order of position."""
    keys, values = (x[-window:] if window else x for x in (keys.double(), values.double()))
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    weights = torch.einsum("hd,phd->hp", query.double() * SCALE, keys).softmax(dim=-1)
    return torch.einsum("hp,phd->hd", weights, values).flatten()


def case_of(bench: Bench, base: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of committed text and of a tree behind it, and the queries of the tree."""
    shape = (base + nodes, bench.groups, bench.width)
    return bench.random(*shape), bench.random(*shape), bench.random(nodes, bench.groups * bench.group, bench.width)


CASES = [
    Bench(),
    Bench(group=1, groups=3),
    Bench(group=3, groups=3),
    Bench(group=7, groups=1, page_size=32),
    Bench(width=64, page_size=4, pages=64),
    Bench(width=80, group=4, scatter=True),
    Bench(window=20),
    Bench(window=5, page_size=32, group=1),
    Bench(window=40, scatter=True, group=3),
    Bench(dtype=torch.bfloat16, width=32),
    Bench(dtype=torch.bfloat16, scatter=True, window=33),
]


@pytest.mark.parametrize("bench", CASES, ids=str)
def test_it_is_softmax_attention_over_a_rows_path(bench) -> None:
    for base, nodes, reach in ((0, 1, 1), (0, 20, 5), (3, 9, 1), (16, 30, 64), (37, 64, 6), (100, 5, 2)):
        keys, values, query = case_of(bench, base, nodes)
        tree = bench.tree(nodes, reach)
        table = bench.text(keys, values)
        table.commit(base)
        result = bench.attend(Rows.of_tree(table, tree), query)
        table.release()
        for node, path in enumerate(paths_of(tree)):
            seen = [*range(base), *(base + ancestor for ancestor in path)]
            wanted = definition(query[node], keys[seen], values[seen], bench.group, bench.window)
            assert (result[node].double() - wanted).abs().max() < (1e-5 if bench.dtype is torch.float32 else 0.02), (
                f"base {base}, path {path}"
            )


@pytest.mark.parametrize("count", [1, 3], ids=["one_thread", "three_threads"])
def test_a_row_has_the_same_bits_in_prefill_chunks_of_any_size(count) -> None:
    bench = Bench(width=64, pages=80)
    length = 900
    keys, values, _ = case_of(bench, length, 0)
    query = bench.random(length, 4, 64)
    with threads(count):
        at_once = _chunk(bench, keys, values, query, 0, length)
        for start, stop in ((0, 200), (1, 34), (90, 180), (333, 797), (510, 550), (760, 900)):
            assert torch.equal(_chunk(bench, keys, values, query, start, stop), at_once[start:stop])
        for position in range(0, length, 37):
            seen = slice(0, position + 1)
            assert torch.equal(at_once[position], bench.row_alone(keys[seen], values[seen], query[position]))


def _chunk(bench: Bench, keys: Tensor, values: Tensor, query: Tensor, start: int, stop: int) -> Tensor:
    table = bench.text(keys[:stop], values[:stop])
    result = bench.attend(Rows(table, torch.zeros(stop - start, dtype=torch.int64), start), query[start:stop])
    table.release()
    return result
