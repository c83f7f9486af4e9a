"""Stores and their fill marks, by example: page size 4; and the two row operations."""

from __future__ import annotations

import pytest
import torch

from foresay.kvpaging import KVStore, PagePool, PageTable, PrefixIndex, move_rows, store_rows
from foresay.verifier.model.config import KVShape


def _pair(num_pages: int = 12) -> tuple[PagePool, KVStore, KVStore]:
    pool = PagePool(num_pages, page_size=4)
    target = KVStore(pool, [KVShape(2, 3, 3)] * 2, torch.float32)
    drafter = KVStore(pool, [KVShape(1, 2, 2)], torch.bfloat16)
    return pool, target, drafter


def _table(pool: PagePool, length: int, *stores: KVStore) -> PageTable:
    table = PageTable(pool)
    table.reserve(length)
    table.commit(length)
    for store in stores:
        store.mark(table, length)
    return table


def test_shapes_and_dtypes() -> None:
    pool, target, drafter = _pair()
    assert [part.shape for part in target.tensors] == [(2, 48, 2, 3)] * 2
    assert drafter.tensors[0].dtype == torch.bfloat16
    assert not target.tensors[0].any()
    assert pool.stores == [target, drafter]


def test_layers_that_keep_the_same_share_an_array() -> None:
    """In the order in which shapes first occur; a model whose layers are alike has one array."""
    pool, (small, large) = PagePool(3, page_size=4), (KVShape(1, 4, 4), KVShape(2, 3, 5))
    store = KVStore(pool, [small, large, small, small], torch.int8)
    assert [arrays.keys.shape for arrays in store.arrays] == [(3, 12, 1, 4), (1, 12, 2, 3)]
    assert [arrays.values.shape for arrays in store.arrays] == [(3, 12, 1, 4), (1, 12, 2, 5)]
    for layer, (arrays, place) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2)]):
        for mine, part in zip(store.layer(layer), store.arrays[arrays].tensors, strict=True):
            assert mine is not None and mine.data_ptr() == part[place].data_ptr()


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
    store.poison()
    for part in store.tensors:
        assert part[0, table.slots(0, 4), 0, 0].tolist() == [4, 0, 3, 4]
        assert part[0, other.slots(0, 3), 0, 0].tolist() == [4, 2, 3]
        assert part[0, other.slots(3, 4)].isnan().all()


def test_each_store_knows_how_far_it_came() -> None:
    pool, target, drafter = _pair()
    table = _table(pool, 10, target)
    assert (target.filled(table), drafter.filled(table)) == (10, 0)
    drafter.mark(table, 7)
    assert drafter.filled(table) == 7
    drafter.mark(table, 9)
    assert drafter.filled(table) == 9
    drafter.mark(table, 3)  # a mark says what is valid, it takes nothing back
    assert drafter.filled(table) == 9


def test_rows_behind_the_text_cannot_be_marked() -> None:
    pool, target, _ = _pair()
    table = _table(pool, 5)
    table.reserve(3)
    with pytest.raises(AssertionError, match="6 rows marked, 5 tokens committed"):
        target.mark(table, 6)


def test_filled_stops_at_the_first_gap() -> None:
    """A prefix can be put together from pages of two sequences, of which one had a resting drafter."""
    pool, target, drafter = _pair()
    first, second = _table(pool, 4, target), _table(pool, 8, target, drafter)
    mixed = PageTable(pool)
    for page in (first.pages[0], second.pages[1]):
        pool.retain(page)
    mixed.adopt([first.pages[0], second.pages[1]], 8)
    assert (target.filled(mixed), drafter.filled(mixed)) == (8, 0)
    drafter.mark(mixed, 2)
    assert (drafter.filled(mixed), drafter.filled(first)) == (2, 2)
    drafter.mark(mixed, 4)
    assert drafter.filled(mixed) == 8


def test_rollback_takes_marks_along() -> None:
    pool, target, drafter = _pair()
    table = _table(pool, 10, target, drafter)
    table.truncate(6)
    assert (target.marks[1:4], drafter.marks[1:4]) == ([4, 2, 2], [4, 2, 2])  # page 3 is free: reset when it is taken
    table.reserve(3)
    table.commit(3)
    assert target.marks[1:4] == [4, 2, 0]
    assert (target.filled(table), drafter.filled(table)) == (6, 6)


def test_rollback_to_a_page_border_forgets_full_pages() -> None:
    pool, target, _ = _pair()
    table = _table(pool, 12, target)
    assert target.filled(table) == 12
    table.truncate(4)
    table.reserve(8)
    table.commit(8)
    assert target.filled(table) == 4


def test_rollback_in_a_shared_page_keeps_the_others_mark() -> None:
    pool, target, drafter = _pair()
    table = _table(pool, 7, target, drafter)
    other = table.fork()
    table.truncate(5)
    assert (target.filled(table), target.filled(other)) == (5, 7)
    table.reserve(2)  # copies the page, without the two rows of the other text
    table.commit(2)
    assert (target.filled(table), drafter.filled(table)) == (5, 5)
    assert (target.filled(other), drafter.filled(other)) == (7, 7)


def test_rows_left_by_a_sequence_that_went_are_not_taken_for_ours() -> None:
    pool, target, drafter = _pair()
    table = _table(pool, 7, target, drafter)
    other = table.fork()
    table.truncate(5)
    other.release()
    table.reserve(2)
    table.commit(2)
    assert table.pages == [1, 2]
    assert (target.filled(table), drafter.filled(table)) == (5, 5)


def test_rollback_into_a_full_published_page() -> None:
    pool, target, _ = _pair()
    index = PrefixIndex(pool)
    table = _table(pool, 8, target)
    index.publish(table, list(range(8)))
    table.truncate(6)
    assert target.filled(table) == 6
    table.reserve(2)
    table.commit(2)
    assert target.filled(table) == 6


def test_a_resting_drafter_catches_up_in_shared_pages() -> None:
    pool, target, drafter = _pair()
    table = _table(pool, 7, target)
    other = table.fork()
    drafter.mark(table, 6)
    assert drafter.filled(other) == 6
    third = other.fork()
    third.reserve(1)
    assert drafter.filled(third) == 6


def test_marks_do_not_survive_a_page() -> None:
    pool, target, drafter = _pair(num_pages=3)
    _table(pool, 8, target, drafter).release()
    table = _table(pool, 8, target)
    assert (target.filled(table), drafter.filled(table)) == (8, 0)


def test_marks_survive_in_the_prefix_index() -> None:
    pool, target, drafter = _pair()
    index = PrefixIndex(pool)
    tokens = list(range(9))
    table = _table(pool, 8, target)
    drafter.mark(table, 6)
    index.publish(table, tokens)
    table.release()
    again = PageTable(pool)
    again.adopt(index.match(tokens), 8)
    assert (target.filled(again), drafter.filled(again)) == (8, 6)


def test_poison_spares_what_may_be_read() -> None:
    pool, target, _ = _pair(num_pages=5)
    table = _table(pool, 6, target)
    _table(pool, 4, target).release()
    target.poison()
    slots = torch.zeros(20, dtype=torch.bool)
    slots[:4] = True
    slots[table.slots(0, 6)] = True
    for rows in target.tensors:
        assert not rows[:, slots].isnan().any()
        assert rows[:, ~slots].isnan().all()


def test_moving_an_accepted_path_down() -> None:
    pool, target, _ = _pair()
    table = _table(pool, 6, target)
    table.reserve(6)
    (arrays,) = target.arrays
    arrays.keys[:, table.slots(6, 12)] = torch.arange(6.0)[:, None, None]
    arrays.values[:, table.slots(6, 12)] = -torch.arange(6.0)[:, None, None]
    scratch = table.slots(6, 12)
    target.move(scratch[[0, 2, 5]], scratch[[0, 1, 2]])
    for layer in range(2):
        assert arrays.keys[layer, table.slots(6, 9), 1, 2].tolist() == [0, 2, 5]
        assert arrays.values[layer, table.slots(6, 9), 1, 2].tolist() == [0, -2, -5]


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
