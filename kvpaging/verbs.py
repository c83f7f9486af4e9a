"""The four verbs of every state that a pool keeps of texts: rows, windows, recurrent states, what drafters read.

    reserve      there is room for what a step writes
    commit       tokens became text, or a table got or lost pages
    checkpoint   texts that find a page by its text can start from its end
    restore      a text goes back, or starts from a prefix: at the largest checkpoint that all stores have

The pool, page tables, the prefix index and the disk call them, and know no store by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from torch import Tensor

#: No page; also the number of the padding page.
NONE = 0


class OutOfPages(RuntimeError):
    """More pages were requested than are free or evictable; nothing was changed."""


class TableState:
    """What the text of one page table has in a store besides its pages."""

    def reserve(self, fresh: int, steps: int) -> None:
        """Make room for the next step, for which the table gets ``fresh`` pages. steps: how many write before the host
        knows of it. Raises OutOfPages with nothing changed."""

    def commit(self, length: int, count: int) -> None:
        """``length`` tokens are committed now; the table keeps its first ``count`` pages, but still lists others."""

    def checkpoint(self, length: int, page: int) -> None:
        """Texts with the same first ``length`` tokens, whole pages, find ``page``: keep what they continue from."""

    def restore(self, length: int) -> int:
        """Go back to at most ``length`` tokens; returns from where it can continue. Called again if others go back
        further; commit follows."""
        return length

    def adopt(self, pages: Sequence[int], known: int) -> None:
        """Start from the checkpoint at the end of these pages; commit follows. known: tokens with cached pages."""

    def align_chunk(self, rows: int) -> int:
        """The number of prompt rows, reduced to end where a checkpoint is to be."""
        return rows

    def fork(self, other: TableState) -> None:
        """The other is that of a second, new table with the same text; commit follows."""


class Table(Protocol):
    """What stores and the pool need from a page table."""

    pages: list[int]
    length: int
    chain: list[bytes]
    states: tuple[TableState, ...]


class Store:
    """State of all texts of a pool, by page.

    name: the suffix of its files on disk; empty: it has none of its own. drafts: whether only texts that are drafted
    for need it.
    """

    name = ""
    drafts = False

    def table_state(self, pages: list[int]) -> TableState | None:
        """What an empty table with this list of pages has besides."""

    def forget(self, page: int) -> None:
        """The page became free."""

    def copy(self, source: int, destination: int) -> None:
        """Copy what it has of a page's rows."""

    def clamp(self, page: int, rows: int) -> None:
        """At most the first ``rows`` rows of the page are text."""

    def restorable(self, pages: Sequence[int]) -> int:
        """The most leading pages of a text after which it can continue."""
        return len(pages)

    def inherit(self, known: int, page: int) -> bool:
        """Texts find ``known``, which has the text of ``page``: give it what only the latter has. False if that is
        impossible; then ``page`` replaces it."""
        return True

    def replace(self, known: int, page: int) -> None:
        """Texts find ``page`` instead of ``known``."""

    def flush(self, page: int) -> None:
        """The page is about to be written to disk."""

    def local_page(self, page: int) -> int:
        """The own page for a page of the pool; ``NONE`` if there is none."""
        return page

    def loading(self, page: int) -> AbstractContextManager[int]:
        """The own page for a page that no table reads yet, while it is loaded; ``NONE`` if there is no room."""
        return nullcontext(page)

    def check(self, tables: Iterable[Table], free: Collection[int], cached: Collection[int]) -> None:
        """Raises AssertionError with what is wrong with the accounting, given every table in use. cached: the pages in
        the prefix index."""


class RowPages(Store):
    """The pages of rows of layers: here those of the pool itself. page_map: int32[pool_pages], the own page of each.
    window: how many positions these layers attend to; None: all."""

    name = "rows"
    window: int | None = None

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.page_map = np.arange(num_pages, dtype=np.int32)

    def first_page(self, length: int) -> int:
        """The index of the first of a text's pages that the row at position ``length`` attends to."""
        return 0

    def slots(self, slots: Tensor) -> Tensor:
        """The slots in these pages for slots of the pool: int64; on the CPU if they differ."""
        return slots

    def local_page(self, page: int) -> int:
        """See :class:`Store`."""
        return int(self.page_map[page])
