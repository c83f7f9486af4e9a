"""Window pages, by example: page size 2, a window of 4 positions, the row's own included."""

from __future__ import annotations

from foresay.kvpaging import PagePool, PageTable, PrefixIndex, WindowPages


class Case:
    """A pool with few window pages, its index, and texts written into it step by step."""

    def __init__(self, windows: int, num_pages: int = 40) -> None:
        self.pool = PagePool(num_pages, page_size=2)
        self.windows = self.pool.attach(WindowPages(1 + windows, 4, num_pages, page_size=2))
        self.index = PrefixIndex(self.pool)
        self.tables: list[PageTable] = []

    def write(self, tokens: list[int], pages: list[int] | None = None) -> PageTable:
        """pages: a prefix that was matched."""
        table = PageTable(self.pool)
        self.tables.append(table)
        table.adopt(pages or [], 2 * len(pages or []))
        while table.length < len(tokens):
            table.reserve(1)
            table.commit(1)
        self.index.publish(table, tokens)
        self.check()
        return table

    def finish(self, table: PageTable) -> None:
        table.release()
        self.tables.remove(table)
        self.check()

    def found(self, tokens: list[int]) -> int:
        """How many tokens of a text can be shared."""
        pages = self.index.match(tokens)
        for page in reversed(pages):
            self.pool.release(page)
        return 2 * len(pages)

    def check(self) -> None:
        self.pool.check(self.tables)

    def kept(self, table: PageTable) -> list[bool]:
        """Which of a text's pages have a window page."""
        return [bool(own) for own in self.windows.page_map[table.pages]]


def text(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_a_text_needs_no_more_window_pages_however_long_it_is() -> None:
    """Of 30 tokens positions 27 to 29 are seen by the next row: with its own they are the window."""
    case = Case(windows=3)
    table = case.write(text(0, 30))
    assert case.kept(table) == [False] * 12 + [True] * 3


def test_pages_that_texts_went_past_go_first() -> None:
    """A text that is over can go on for as long as possible; of others only their ends are left."""
    case = Case(windows=8)
    case.finish(case.write(text(0, 10)))
    case.write(text(100, 30))
    assert case.found(text(0, 11)) == 10
    assert case.found([*text(0, 7), 9, 9]) == 0
    case.write(text(200, 30))
    case.write(text(300, 7))
    assert case.found(text(0, 11)) == 0


def test_a_page_that_has_its_window_page_takes_the_place_of_one_that_lost_it() -> None:
    """Else a text that had to be computed again would have to be every time."""
    case = Case(windows=6)
    case.finish(case.write(text(0, 8)))
    others = [case.write(text(first, 9)) for first in (200, 300)]
    assert case.found(text(0, 9)) == 0
    for other in others:
        case.finish(other)
    case.finish(case.write(text(0, 8)))
    assert case.found(text(0, 9)) == 8
