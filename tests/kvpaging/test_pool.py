"""The pool: which pages are handed out, what happens at the end of the supply, and that `check` sees every damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foresay.kvpaging import OutOfPages, PagePool, PageTable, PrefixIndex


def _text(pool: PagePool, index: PrefixIndex, tokens: list[int]) -> PageTable:
    table = PageTable(pool)
    table.reserve(len(tokens))
    table.commit(len(tokens))
    index.publish(table, tokens)
    return table


def test_a_fresh_pool_hands_out_consecutive_pages_and_never_the_padding_page() -> None:
    pool = PagePool(6, page_size=4)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.available == 0
    assert pool.references(0) == 0


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


def test_a_blocked_sequence_jumps_to_the_longest_free_run() -> None:
    pool = PagePool(12, page_size=4)
    pool.allocate(11)
    for page in (2, 5, 6, 7, 8, 10):
        pool.release(page)
    assert pool.allocate(1, after=1) == [2]
    assert pool.allocate(4, after=2) == [5, 6, 7, 8]


def test_a_refused_allocation_evicts_nothing() -> None:
    pool = PagePool(5, page_size=2)
    index = PrefixIndex(pool)
    _text(pool, index, [1, 2, 3, 4]).release()
    with pytest.raises(OutOfPages):
        pool.allocate(5)
    assert len(index) == 2
    pool.check([])


def test_releasing_or_retaining_a_free_page_is_a_bug() -> None:
    pool = PagePool(3, page_size=4)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(1)
    with pytest.raises(AssertionError, match="free"):
        pool.retain(1)


def test_eviction_takes_the_oldest_text_first_and_its_tail_before_its_head() -> None:
    pool = PagePool(7, page_size=2)
    index = PrefixIndex(pool)
    old, new = _text(pool, index, [1, 2, 3, 4, 5, 6]), _text(pool, index, [7, 8, 9, 10])
    old_pages, new_pages = list(old.pages), list(new.pages)
    old.release()
    new.release()
    assert pool.available == 6
    evicted: list[int] = []
    for _ in range(5):
        before = set(index)
        assert index.pool.evict(1) == 1
        evicted += before - set(index)
        pool.check([])
    assert evicted == [*reversed(old_pages), *reversed(new_pages)]
    assert index.pool.evict(1) == 0


def test_a_text_asked_for_again_is_evicted_last() -> None:
    pool = PagePool(7, page_size=2)
    index = PrefixIndex(pool)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    for tokens in (first, second):
        _text(pool, index, tokens).release()
    again = PageTable(pool)
    again.adopt(index.match([*first, 0]), 4)
    again.release()
    index.pool.evict(2)
    assert len(index.match([*second, 0])) == 0
    assert len(index.match([*first, 0])) == 2


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
