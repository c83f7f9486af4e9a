"""The pool of page ids: references, free pages, eviction.

    page id      0          1 .. num_pages - 1
              padding   free | used by tables | used by tables and the prefix index | idle: only the index

A page is free (no reference) or used (one reference per table that lists it, one more if the prefix index lists it).
Idle pages count as available: `allocate` evicts them from the index, the least recently released first. The pool owns
no KV tensors; the stores attached to it are notified when a page is reused or copied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from foresay.kvpaging.verbs import NONE, OutOfPages, RowPages, Store, Table

PADDING_PAGE = NONE
S = TypeVar("S", bound=Store)


class Cache(Protocol):
    """What the pool needs from the prefix index. held: pages that it holds besides those of its entries."""

    held: list[int]

    def __contains__(self, page: object) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...

    def forget(self, page: int) -> None:
        """Drop the entry of a page; the pool releases its reference."""

    def page_of(self, digest: bytes) -> int | None:
        """The page of the text prefix with this digest; None if not indexed."""


class PagePool:
    """Page ids with reference counts.

    num_pages: all pages, including the padding page 0 (target of padding writes, never allocated).
    page_size: tokens (slots) per page.
    rows: its own pages, as those of layers' rows. stores: all that is kept of texts, by page.
    """

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        assert num_pages > 1 and page_size > 0
        self.num_pages, self.page_size = num_pages, page_size
        self.rows, self.stores = RowPages(num_pages, page_size), list[Store]()
        self._cache: Cache | None = None
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))  # the last is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free ones and those only the prefix index refers to."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that only the prefix index refers to."""
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that this many tokens need."""
        return -(-tokens // self.page_size)

    def references(self, page: int) -> int:
        """How many tables list the page, plus one if the prefix index does."""
        return self._references[page]

    def attach(self, store: S) -> S:
        """Keep a further state of all texts; returns it. Attach pages of windows and states before all stores of rows,
        and before any table is made."""
        self.stores.append(store)
        return store

    def find_store(self, kind: type[S]) -> S | None:
        """The first store of this type, if there is one."""
        return next((store for store in self.stores if isinstance(store, kind)), None)

    def attach_cache(self, cache: Cache) -> None:
        """Make `cache` the prefix index of this pool. A pool has one."""
        assert self._cache is None, "a pool has one prefix index"
        self._cache = cache

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages with one reference each, all or none; idle ones only where too few are free.

        Raises OutOfPages, with nothing changed, if fewer than `n` pages are available.
        """
        if n > self.available:
            raise OutOfPages(f"{n} pages needed, {self.available} of {self.num_pages - 1} available")
        self.evict(n - len(self._free))
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page in use."""
        references = self._references[page]
        assert references > 0, f"page {page} is free"
        self._references[page] = references + 1
        if references == 1:
            self._idle.pop(page, None)

    def release(self, page: int) -> None:
        """Drop one reference. Release a sequence's pages last to first: idle pages are evicted in this order."""
        references = self._references[page] - 1
        assert references >= 0, f"page {page} is free already"
        self._references[page] = references
        if references == 0:
            self._free.append(page)
            for store in self.stores:
                store.forget(page)
        elif references == 1 and self._cache is not None and page in self._cache:
            self._idle[page] = None

    def cached_page(self, table: Table, index: int) -> int:
        """The page by which others find the text up to the table's page `index`: that page, unless another with the
        same text is indexed."""
        if self._cache is None or index >= len(table.chain):
            return table.pages[index]
        known = self._cache.page_of(table.chain[index])
        return table.pages[index] if known is None else known

    def replace(self, known: int, page: int) -> None:
        """Drop the prefix index entry of a page: another page with the same text replaces it."""
        assert self._cache is not None
        for store in self.stores:
            store.replace(known, page)
        self._idle.pop(known, None)
        self._cache.forget(known)
        self.release(known)

    def evict(self, n: int) -> int:
        """Evict up to `n` idle pages from the prefix index; returns how many became free."""
        count = max(0, min(n, len(self._idle)))
        for _ in range(count):
            page, _none = self._idle.popitem(last=False)
            assert self._cache is not None
            self._cache.forget(page)
            self.release(page)
        return count

    def copy(self, source: int, destination: int, rows: int) -> None:
        """Copy a page in all stores; in the copy at most the first `rows` rows count as valid."""
        for store in self.stores:
            store.copy(source, destination)
        self.clamp(destination, rows)

    def clamp(self, page: int, rows: int) -> None:
        """Make at most the first `rows` rows of a page valid, in all stores."""
        assert self._references[page] == 1, "marks of a shared page are never lowered"
        for store in self.stores:
            store.clamp(page, rows)

    def check(self, tables: Iterable[Table], at_rest: bool = False) -> None:
        """Check the accounting, given every table in use; raises AssertionError with what is wrong.

        at_rest: no step is in flight, so each table must hold exactly ceil(length / page_size) pages.
        """
        tables = list(tables)
        cached = set(self._cache or ())
        held = Counter(cached)
        held.update(() if self._cache is None else self._cache.held)
        for table in tables:
            held.update(table.pages)
            self._check_table(table, at_rest)
        free = set(self._free)
        for page, found in enumerate(self._references):
            idle = found == 1 and page in cached
            assert found == held[page], f"page {page}: {found} references counted, {held[page]} found"
            is_free = not found and page != PADDING_PAGE
            assert (page in free) == is_free, f"page {page}: {found} references and free = {page in free}"
            assert idle == (page in self._idle), f"page {page}: idle is {idle}, listed as {not idle}"
        assert len(free) == len(self._free), "a page is free twice"
        assert not held[PADDING_PAGE], "the padding page is in use"
        for store in self.stores:
            store.check(tables, free, cached)

    def _check_table(self, table: Table, at_rest: bool) -> None:
        needed, count = self.pages_for(table.length), len(table.pages)
        assert len(set(table.pages)) == count, f"a table lists a page twice: {table.pages}"
        assert count >= needed, f"{count} pages cannot hold {table.length} tokens"
        assert not at_rest or count == needed, f"at rest {table.length} tokens hold {count} pages, not {needed}"
