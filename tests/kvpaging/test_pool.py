"""The pool: which pages are handed out, what happens at the end of the supply, and that `check` sees every damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foresay.kvpaging import PagePool, PageTable, PrefixIndex


def _text(pool: PagePool, index: PrefixIndex, tokens: list[int]) -> PageTable:
    table = PageTable(pool)
    table.reserve(len(tokens))
    table.commit(len(tokens))
    index.publish(table, tokens)
    return table


def test_releasing_or_retaining_a_free_page_is_a_bug() -> None:
    pool = PagePool(3, page_size=4)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(1)
    with pytest.raises(AssertionError, match="free"):
        pool.retain(1)


def test_while_half_of_the_pool_is_free_no_cached_text_is_evicted() -> None:
    """However scattered the free half is: every second page."""
    pool = PagePool(65, page_size=1)
    index = PrefixIndex(pool)
    tables = [_text(pool, index, [token]) for token in range(64)]
    for table in sorted(tables, key=lambda table: table.pages[0] % 2):
        table.release()
    pool.evict(32)
    assert sorted(index) == list(range(1, 65, 2))
    tables = [PageTable(pool) for _ in range(4)]
    for _ in range(8):
        for table in tables:
            table.reserve(1)
            table.commit(1)
    assert len(index) == 32 and pool.available == 32
    tables[0].reserve(1)
    assert len(index) == 31, "evicted only once no page is free"
    pool.check(tables)


def _lost_reference(pool: PagePool, table: PageTable) -> None:
    pool.release(table.pages[0])


def _leaked_reference(pool: PagePool, table: PageTable) -> None:
    pool.retain(table.pages[0])


def _leaked_page(pool: PagePool, table: PageTable) -> None:
    table.pages.pop()


def _listed_twice(pool: PagePool, table: PageTable) -> None:
    pool.release(table.pages[1])
    pool.retain(table.pages[0])
    table.pages[1] = table.pages[0]


def _too_long(pool: PagePool, table: PageTable) -> None:
    table.length += 4


def _free_twice(pool: PagePool, table: PageTable) -> None:
    pool._free.append(pool._free[-1])


@pytest.mark.parametrize(
    "damage", [_lost_reference, _leaked_reference, _leaked_page, _listed_twice, _too_long, _free_twice]
)
def test_check_finds(damage: Callable[[PagePool, PageTable], None]) -> None:
    pool = PagePool(8, page_size=2)
    table = PageTable(pool)
    table.reserve(4)
    table.commit(4)
    pool.check([table], at_rest=True)
    damage(pool, table)
    with pytest.raises(AssertionError):
        pool.check([table])


def test_check_at_rest_finds_pages_kept_past_the_text() -> None:
    pool = PagePool(8, page_size=2)
    table = PageTable(pool)
    table.reserve(4)
    table.commit(2)
    pool.check([table])
    with pytest.raises(AssertionError, match="at rest 2 tokens hold 2 pages, not 1"):
        pool.check([table], at_rest=True)
