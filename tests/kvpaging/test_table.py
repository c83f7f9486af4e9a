"""Page tables, by example: page size 4 throughout, so that borders are near."""

from __future__ import annotations

import pytest
import torch

from foresay.kvpaging import KVStore, OutOfPages, PagePool, PageTable
from foresay.verifier.model.config import KVShape
from tests.poison import poison_store


def _table(pool: PagePool, length: int) -> PageTable:
    table = PageTable(pool)
    table.reserve(length)
    table.commit(length)
    return table


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


def test_a_fork_shares_pages_until_one_of_the_two_writes() -> None:
    pool = PagePool(10, page_size=4)
    store = KVStore(pool, [KVShape(1, 2, 2)] * 2, torch.float32)
    table = _table(pool, 6)
    keys, _ = store.tensors
    keys[:, table.slots(0, 6)] = torch.arange(6.0)[:, None, None]
    store.mark(table, 6)
    poison_store(store)
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
