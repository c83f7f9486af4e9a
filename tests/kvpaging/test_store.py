"""Stores and their fill marks, by example: page size 4; and the two row operations."""

from __future__ import annotations

import torch

from foresay.kvpaging import KVStore, PagePool, PageTable, move_rows, store_rows
from foresay.verifier.model.config import KVShape
from tests.poison import poison_store


def _table(pool: PagePool, length: int, *stores: KVStore) -> PageTable:
    table = PageTable(pool)
    table.reserve(length)
    table.commit(length)
    for store in stores:
        store.mark(table, length)
    return table


def test_layers_that_keep_the_same_share_an_array() -> None:
    """In the order in which shapes first occur; a model whose layers are alike has one array."""
    pool, (small, large) = PagePool(3, page_size=4), (KVShape(1, 4, 4), KVShape(2, 3, 5))
    store = KVStore(pool, [small, large, small, small], torch.int8)
    assert [arrays.keys.shape for arrays in store.arrays] == [(3, 12, 1, 4), (1, 12, 2, 3)]
    assert [arrays.values.shape for arrays in store.arrays] == [(3, 12, 1, 4), (1, 12, 2, 5)]
    for layer, (arrays, position) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2)]):
        for mine, part in zip(store.layer(layer), store.arrays[arrays].tensors, strict=True):
            assert mine is not None and mine.data_ptr() == part[position].data_ptr()


def test_every_array_is_moved_copied_and_poisoned() -> None:
    pool = PagePool(3, page_size=4)
    store = KVStore(pool, [KVShape(1, 2, 2), KVShape(2, 1, 3)], torch.float32)
    table = _table(pool, 4, store)
    rows = torch.arange(1.0, 5.0)[:, None, None]
    for part in store.tensors:
        part[:, table.slots(0, 4)] = rows
    store.move(table.slots(3, 4), table.slots(0, 1))
    other = table.fork()
    other.truncate(3)
    other.reserve(1)
    store.clear(table.slots(1, 2))
    poison_store(store)
    for part in store.tensors:
        assert part[0, table.slots(0, 4), 0, 0].tolist() == [4, 0, 3, 4]
        assert part[0, other.slots(0, 3), 0, 0].tolist() == [4, 2, 3]
        assert part[0, other.slots(3, 4)].isnan().all()


def test_move_rows_reads_everything_first() -> None:
    keys, values = torch.arange(12.0).view(2, 6, 1, 1), torch.arange(12.0, 24.0).view(2, 6, 1, 1)
    move_rows((keys, values), torch.tensor([1, 2, 0]), torch.tensor([2, 1, 3]))
    assert keys.flatten().tolist() == [0, 2, 1, 0, 4, 5, 6, 8, 7, 6, 10, 11]
    assert values.flatten().tolist() == [12, 14, 13, 12, 16, 17, 18, 20, 19, 18, 22, 23]
    move_rows((keys, values), torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert keys.flatten().tolist() == [0, 2, 1, 0, 4, 5, 6, 8, 7, 6, 10, 11]


def test_store_rows_writes_one_layer() -> None:
    keys, values = torch.zeros(2, 6, 2, 1), torch.zeros(2, 6, 2, 1)
    k, v = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[..., None], torch.tensor([[5.0, 6.0], [7.0, 8.0]])[..., None]
    store_rows(keys[1], values[1], torch.tensor([4, 1]), k, v)
    assert keys[1, :, 0, 0].tolist() == [0, 3, 0, 0, 1, 0]
    assert values[1, :, 1, 0].tolist() == [0, 8, 0, 0, 6, 0]
    assert not keys[0].any()
