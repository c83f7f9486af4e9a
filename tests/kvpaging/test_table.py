"""Page tables, by example: page size 4 throughout, so that borders are near."""

from __future__ import annotations

import pytest
import torch

from foresay.kvpaging import KVStore, OutOfPages, PagePool, PageTable
from foresay.verifier.model.config import KVShape


def _table(pool: PagePool, length: int) -> PageTable:
    table = PageTable(pool)
    table.reserve(length)
    table.commit(length)
    return table


def test_a_step_reserves_commits_and_trims() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 6)
    assert (table.pages, table.length, table.capacity) == ([1, 2], 6, 8)
    table.reserve(7)
    assert table.pages == [1, 2, 3, 4]
    table.commit(3)
    table.trim()
    assert (table.pages, table.length) == ([1, 2, 3], 9)
    pool.check([table], at_rest=True)


def test_reserving_what_fits_changes_nothing() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 5)
    table.reserve(3)
    assert table.pages == [1, 2]
    table.reserve(0)
    assert table.pages == [1, 2]


def test_only_reserved_rows_can_be_committed() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 5)
    with pytest.raises(AssertionError, match="1 tokens committed, 0 reserved"):
        table.commit(1)
    table.reserve(2)
    table.commit(1)
    table.fork()
    with pytest.raises(AssertionError):
        table.commit(1)


def test_what_was_given_back_is_no_longer_reserved() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 5)
    table.reserve(7)
    table.trim()
    with pytest.raises(AssertionError, match="4 tokens committed, 3 reserved"):
        table.commit(4)
    table.truncate(2)
    with pytest.raises(AssertionError, match="1 tokens committed, 0 reserved"):
        table.commit(1)


def test_slots_of_pages_out_of_order() -> None:
    pool = PagePool(10, page_size=4)
    pool.allocate(9)
    table = PageTable(pool)
    table.adopt([5, 6, 2], 12)
    assert table.run is None
    assert table.slots(2, 10).tolist() == [22, 23, 24, 25, 26, 27, 8, 9]
    assert table.slots(0, 8).tolist() == list(range(20, 28))
    assert table.slots(3, 3).tolist() == []
    assert table.slots(0, 12).dtype == torch.int64


def test_slots_handed_out_stay_what_they_were() -> None:
    pool = PagePool(10, page_size=4)
    blocker = _table(pool, 4)
    table = PageTable(pool)
    table.adopt(pool.allocate(1, after=8), 4)
    table.reserve(4)  # behind page 9 there is nothing: not consecutive
    before = table.slots(0, 8)
    seen = before.tolist()
    table.trim()
    other = _table(pool, 8)
    table.reserve(8)
    assert table.slots(0, 12).tolist() != seen
    assert before.tolist() == seen
    pool.check([blocker, table, other])


def test_slots_outside_the_pages_are_refused() -> None:
    table = _table(PagePool(10, page_size=4), 5)
    with pytest.raises(AssertionError):
        table.slots(0, 9)


def test_run_is_the_first_slot_of_consecutive_pages() -> None:
    pool = PagePool(20, page_size=4)
    table = _table(pool, 4)
    blocker = PageTable(pool)
    blocker.adopt(pool.allocate(1, after=table.pages[-1] + 1), 4)
    runs = [PageTable(pool).run, table.run]
    for extra in (4, 8):
        table.reserve(extra)
        runs.append(table.run)
    table.trim()
    assert [*runs, table.run] == [None, 4, 4, None, 4]


def test_truncate_gives_the_pages_behind_back() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 11)
    table.truncate(4)
    assert (table.pages, table.length, pool.available) == ([1], 4, 8)
    table.truncate(0)
    assert (table.pages, pool.available) == ([], 9)


def test_a_fork_shares_pages_until_one_of_the_two_writes() -> None:
    pool = PagePool(10, page_size=4)
    store = KVStore(pool, [KVShape(1, 2, 2)] * 2, torch.float32)
    table = _table(pool, 6)
    keys, _ = store.tensors
    keys[:, table.slots(0, 6)] = torch.arange(6.0)[:, None, None]
    store.mark(table, 6)
    store.poison()
    other = table.fork()
    assert other.pages == table.pages == [1, 2]
    pool.check([table, other], at_rest=True)

    other.reserve(1)
    assert table.pages == [1, 2]
    assert other.pages[0] == 1
    assert other.pages[1] != 2
    assert keys[1, other.slots(0, 6), 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert store.filled(other) == 6
    table.reserve(1)  # alone again: nothing left to copy
    assert table.pages == [1, 2]
    pool.check([table, other])


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 8)
    other = table.fork()
    other.reserve(1)
    assert other.pages[:2] == table.pages
    table.reserve(1)
    assert table.pages[2] != other.pages[2]


def test_forking_gives_reserved_pages_back_first() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 6)
    table.reserve(9)
    other = table.fork()
    assert table.pages == other.pages == [1, 2]
    pool.check([table, other], at_rest=True)


def test_out_of_pages_leaves_everything_as_it_was() -> None:
    pool = PagePool(4, page_size=4)
    table = _table(pool, 6)
    other = table.fork()
    other.reserve(1)  # the third and last page holds the copy
    third = table.fork()
    for extra in (1, 3, 40):
        with pytest.raises(OutOfPages):
            third.reserve(extra)
        assert (third.pages, third.length) == (table.pages, 6)
        pool.check([table, other, third], at_rest=True)
    other.release()
    third.reserve(1)
    assert third.pages == [1, 3]


def test_adopt_takes_over_the_references() -> None:
    pool = PagePool(10, page_size=4)
    table = PageTable(pool)
    table.adopt(pool.allocate(2), 8)
    pool.check([table], at_rest=True)
    with pytest.raises(AssertionError, match="empty table"):
        table.adopt([5], 4)
    with pytest.raises(AssertionError, match="1 pages for 8 tokens"):
        PageTable(pool).adopt([5], 8)


def test_release_empties_the_table_and_can_be_repeated() -> None:
    pool = PagePool(10, page_size=4)
    table = _table(pool, 6)
    for _ in range(2):
        table.release()
        assert (table.pages, table.length, table.run, pool.available) == ([], 0, None, 9)
    table.reserve(4)
    table.commit(4)
    pool.check([table], at_rest=True)
