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


def test_allocation_continues_behind_the_given_page() -> None:
    pool = PagePool(20, page_size=4)
    first = pool.allocate(3)
    assert pool.allocate(2, after=first[-1]) == [4, 5]
    assert pool.allocate(2, after=9) == [10, 11]


def test_four_sequences_started_together_all_grow_in_place() -> None:
    pool = PagePool(257, page_size=4)
    tables = [PageTable(pool) for _ in range(4)]
    for _ in range(60 * 4):
        for table in tables:
            table.reserve(1)
            table.commit(1)
    assert all(table.run is not None for table in tables)
    pool.check(tables, at_rest=True)


def test_releasing_or_retaining_a_free_page_is_a_bug() -> None:
    pool = PagePool(3, page_size=4)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(1)
    with pytest.raises(AssertionError, match="free"):
        pool.retain(1)


def test_a_fresh_sequence_may_push_out_old_text_to_be_in_one_piece() -> None:
    pool = PagePool(17, page_size=1)
    index = PrefixIndex(pool)
    tables = [_text(pool, index, [token]) for token in range(16)]
    for table in sorted(tables, key=lambda table: table.pages[0] % 2):
        table.release()
    index.pool.evict(8)
    assert sorted(index) == list(range(1, 17, 2))  # every second page is free, no two in a row
    fresh = PageTable(pool)
    fresh.reserve(2)
    assert fresh.run is not None
    pool.check([fresh])


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


def _written_slots(pool: PagePool, table: PageTable) -> None:
    table.slots(0, 4).zero_()


@pytest.mark.parametrize(
    "damage", [_lost_reference, _leaked_reference, _leaked_page, _listed_twice, _too_long, _written_slots]
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
