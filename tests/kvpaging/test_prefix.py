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


def test_salts_keep_tenants_apart() -> None:
    case = Case()
    pages = case.write([1, 2, 3], "mine").pages
    assert case.match([1, 2, 3], "mine") == pages[:1]
    assert case.match([1, 2, 3], "yours") == []
    assert case.match([1, 2, 3]) == []


def test_large_and_negative_looking_tokens_are_distinguished() -> None:
    case = Case()
    case.write([1, 2**32 + 1])
    assert case.match([1, 1, 0]) == []
    assert case.match([2**32 + 1, 1, 0]) == []
    assert len(case.match([1, 2**32 + 1, 0])) == 1


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
