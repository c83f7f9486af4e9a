"""The prefix index, by example: page size 2."""

from __future__ import annotations

import pytest

import foresay.kvpaging.prefix
from foresay.kvpaging import PagePool, PageTable, PrefixIndex


class Case:
    """A pool with its index, and texts written into it."""

    def __init__(self, num_pages: int = 20) -> None:
        self.pool = PagePool(num_pages, page_size=2)
        self.index = PrefixIndex(self.pool)
        self.tables: list[PageTable] = []

    def write(self, tokens: list[int], salt: str = "") -> PageTable:
        table = PageTable(self.pool)
        table.reserve(len(tokens))
        table.commit(len(tokens))
        self.index.publish(table, tokens, salt)
        self.tables.append(table)
        return table

    def match(self, tokens: list[int], salt: str = "") -> list[int]:
        """The pages matched, given back again."""
        pages = self.index.match(tokens, salt)
        for page in reversed(pages):
            self.pool.release(page)
        self.pool.check(self.tables)
        return pages


def test_the_longest_known_prefix_is_found() -> None:
    case = Case()
    pages = case.write([1, 2, 3, 4, 5]).pages
    assert case.match([1, 2, 3, 4, 5, 6, 7]) == pages[:2]
    assert case.match([1, 2, 3, 9, 9]) == pages[:1]
    assert case.match([9, 2, 3, 4, 5]) == []
    assert case.match([3, 4, 5]) == []


def test_the_last_token_is_always_left_to_compute() -> None:
    case = Case()
    pages = case.write([1, 2, 3, 4]).pages
    assert case.match([1, 2, 3, 4]) == pages[:1]
    assert case.match([1, 2, 3, 4, 5]) == pages
    assert case.match([1, 2]) == []
    assert case.match([1]) == []
    assert case.match([]) == []


def test_matched_pages_are_retained() -> None:
    case = Case()
    table = case.write([1, 2, 3, 4])
    pages = case.index.match([1, 2, 3, 4, 5])
    assert [case.pool.references(page) for page in pages] == [3, 3]
    table.release()
    assert case.index.pool.evict(9) == 0
    other = PageTable(case.pool)
    other.adopt(pages, 4)
    case.pool.check([other], at_rest=True)


def test_salts_keep_tenants_apart() -> None:
    case = Case()
    pages = case.write([1, 2, 3], "mine").pages
    assert case.match([1, 2, 3], "mine") == pages[:1]
    assert case.match([1, 2, 3], "yours") == []
    assert case.match([1, 2, 3]) == []


def test_equal_pages_after_different_text_are_different() -> None:
    case = Case()
    first, second = case.write([1, 2, 7, 8]), case.write([3, 4, 7, 8])
    assert case.match([1, 2, 7, 8, 0]) == first.pages
    assert case.match([3, 4, 7, 8, 0]) == second.pages


def test_large_and_negative_looking_tokens_are_told_apart() -> None:
    case = Case()
    case.write([1, 2**32 + 1])
    assert case.match([1, 1, 0]) == []
    assert case.match([2**32 + 1, 1, 0]) == []
    assert len(case.match([1, 2**32 + 1, 0])) == 1


def test_publishing_grows_with_the_text() -> None:
    case = Case()
    tokens = [1, 2, 3]
    table = case.write(tokens)
    assert len(case.index) == 1
    for token in (4, 5, 6):
        table.reserve(1)
        table.commit(1)
        tokens.append(token)
        case.index.publish(table, tokens)
        assert len(case.index) == len(tokens) // 2
    assert case.match([*tokens, 7]) == table.pages


def test_tokens_behind_the_committed_length_are_not_published() -> None:
    case = Case()
    table = PageTable(case.pool)
    table.reserve(6)
    table.commit(3)
    case.index.publish(table, [1, 2, 3, 4, 5, 6])
    assert len(case.index) == 1


def test_the_same_text_twice_stays_in_the_page_known_first() -> None:
    case = Case()
    first, second = case.write([1, 2, 3]), case.write([1, 2, 3])
    assert first.pages != second.pages
    assert case.match([1, 2, 3]) == first.pages[:1]
    second.release()
    assert case.pool.available == 17
    case.pool.check(case.tables)


def test_a_sequence_that_adopted_pages_publishes_what_it_adds() -> None:
    case = Case()
    case.write([1, 2, 3, 4]).release()
    tokens = [1, 2, 3, 4, 5, 6]
    table = PageTable(case.pool)
    table.adopt(case.index.match(tokens), 4)
    table.reserve(2)
    table.commit(2)
    case.index.publish(table, tokens)
    case.tables.append(table)
    assert case.match([*tokens, 7]) == table.pages


def test_text_that_was_rolled_back_is_published_anew() -> None:
    case = Case()
    table = case.write([1, 2, 3, 4])
    table.truncate(2)
    table.reserve(2)
    table.commit(2)
    case.index.publish(table, [1, 2, 8, 9])
    assert case.match([1, 2, 8, 9, 0]) == table.pages
    assert case.match([1, 2, 3, 4, 0])[:1] == table.pages[:1]


def test_rolling_back_into_a_published_page_leaves_it_to_the_index() -> None:
    case = Case()
    table = case.write([1, 2, 3, 4])
    published = list(table.pages)
    table.truncate(3)
    table.reserve(1)
    assert table.pages[0] == published[0]
    assert table.pages[1] != published[1]
    assert case.match([1, 2, 3, 4, 5]) == published


def test_forks_publish_what_each_goes_on_to_say() -> None:
    case = Case()
    table = case.write([1, 2])
    other = table.fork()
    case.tables.append(other)
    for each, said in ((table, [3, 4]), (other, [5, 6])):
        each.reserve(2)
        each.commit(2)
        case.index.publish(each, [1, 2, *said])
    assert case.match([1, 2, 3, 4, 0]) == table.pages
    assert case.match([1, 2, 5, 6, 0]) == other.pages


def test_a_chain_without_its_head_is_not_found() -> None:
    case = Case(num_pages=4)
    table = case.write([1, 2, 3, 4])
    head = table.pages[0]
    case.pool.retain(table.pages[1])
    kept = table.pages[1]
    table.release()
    assert case.index.pool.evict(1) == 1
    assert head not in case.index
    assert case.index.match([1, 2, 3, 4, 5]) == []
    case.pool.release(kept)
    case.pool.check([])


def test_queries_and_hits_count_tokens() -> None:
    case = Case()
    case.write([1, 2, 3, 4])
    case.match([1, 2, 3, 4, 5])
    case.match([7, 8, 9])
    assert (case.index.queries, case.index.hits) == (8, 4)


def test_a_pool_has_one_index() -> None:
    case = Case()
    with pytest.raises(AssertionError):
        PrefixIndex(case.pool)


def test_equal_digests_of_different_texts_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresay.kvpaging.prefix, "_digest", lambda parent, tokens: bytes([min(parent[0] + 1, 9)]))
    monkeypatch.setattr(foresay.kvpaging.prefix, "_root", lambda salt: b"\0")
    case = Case()
    table = case.write([1, 2, 3, 4])
    other = case.write([8, 9, 3, 4, 5, 6])
    assert len(case.index) == 2
    assert case.match([8, 9, 3, 4, 5, 6, 0]) == []
    assert case.match([1, 2, 3, 4, 5, 6, 0]) == table.pages
    case.pool.check([table, other], at_rest=True)


def test_what_is_kept_warm_makes_room_last() -> None:
    case = Case(num_pages=9)
    first, second = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    for tokens in (first, second):
        case.write(tokens).release()
    asked = (case.index.queries, case.index.hits)
    assert case.index.keep_warm(first) == 4
    assert case.index.keep_warm(first, salt="another") == 0
    assert (case.index.queries, case.index.hits) == asked
    case.tables.clear()
    case.pool.check([])
    case.index.pool.evict(2)
    assert case.match(second) == []
    assert len(case.match(first)) == 2
