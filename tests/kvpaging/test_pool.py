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


def _listed_twice(pool: PagePool, table: PageTable) -> None:
    pool.release(table.pages[1])
    pool.retain(table.pages[0])
    table.pages[1] = table.pages[0]


DAMAGES: dict[str, Callable[[PagePool, PageTable], object]] = {
    "lost reference": lambda pool, table: pool.release(table.pages[0]),
    "leaked reference": lambda pool, table: pool.retain(table.pages[0]),
    "leaked page": lambda pool, table: table.pages.pop(),
    "listed twice": _listed_twice,
    "too long": lambda pool, table: setattr(table, "length", table.length + 4),
    "free twice": lambda pool, table: pool._free.append(pool._free[-1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_check_finds(damage: Callable[[PagePool, PageTable], object]) -> None:
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
