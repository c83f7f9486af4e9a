"""Pages of sliding-window layers: fewer than the pool has, since only the end of a text can be attended to.

    pages of a text     3   7   4   9   12        in the pool, in order of position
    window pages        -   -   2   5   1         where those layers keep the same positions; - no longer kept
                                ^ the first that the next row attends to

A page of the pool gets a window page when it is reserved, and has it as long as a table can see it, that is, attend to
it. After that it keeps it until another needs one: pages that texts went past are evicted first, then the ends of
finished texts, each the longest unseen first. So a text can continue only where the pages that its next row attends to
still have theirs, and a prefix is shared up to such a page (`restorable`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from foresay.kvpaging.verbs import NONE, OutOfPages, RowPages, Table, TableState


class WindowPages(RowPages):
    """The window pages of one pool, which has ``pool_pages`` pages of ``page_size`` slots.

    num_pages: window pages in all, the padding page 0 among them. window: positions that a row sees, its own included.
    page_map: int32[pool_pages], the window page of each page of the pool; 0 where there is none. filling: pages whose
    window page is being read back.
    """

    name = "window"

    def __init__(self, num_pages: int, window: int, pool_pages: int, page_size: int) -> None:
        assert num_pages > 1 and window > 0
        super().__init__(num_pages, page_size)
        self.window: int = window
        self.page_map = np.zeros(pool_pages, np.int32)
        self.filling: list[int] = []
        self._seen = [0] * pool_pages
        self._free = list(range(num_pages - 1, NONE, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Window pages that no table sees."""
        return len(self._free) + len(self._passed) + len(self._left)

    def first_page(self, length: int) -> int:
        """The index of the first of a text's pages that the row at position `length` attends to."""
        return max(length - self.window + 1, 0) // self.page_size

    def table_state(self, pages: list[int]) -> TableWindow:
        """The window of an empty table with this list of pages."""
        return TableWindow(self, pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """A table starts to see these pages of the pool: those without a window page get one."""
        for page in pages:
            self._passed.pop(page, None)
            self._left.pop(page, None)
            if not self.page_map[page]:
                self.page_map[page] = self._take()
            self._seen[page] += 1

    def release(self, page: int, passed: bool) -> None:
        """A table no longer sees the page. passed: because its text went on, past the window."""
        self._seen[page] -= 1
        if not self._seen[page]:
            (self._passed if passed else self._left)[page] = None

    @contextmanager
    def loading(self, page: int) -> Iterator[int]:
        """Give a page that no table sees a window page to fill, which is not evicted before the end. Yields it;
        ``NONE`` if there is no room."""
        if not self.available:
            yield NONE
            return
        self.acquire([page])
        self.filling.append(page)
        try:
            yield self.local_page(page)
        finally:
            self.filling.remove(page)
            self.release(page, passed=True)

    def forget(self, page: int) -> None:
        """Free the page's window page. For the pool, when the page became free."""
        assert not self._seen[page], f"page {page} is seen"
        self._passed.pop(page, None)
        self._left.pop(page, None)
        if self.page_map[page]:
            self._free.append(int(self.page_map[page]))
            self.page_map[page] = NONE

    def restorable(self, pages: Sequence[int]) -> int:
        """The most leading pages of a text after which it can continue."""
        there = found = 0
        for count, own in enumerate(self.page_map[pages], 1):
            there = there + 1 if own else 0
            if count - self.first_page(count * self.page_size) <= there:
                found = count
        return found

    def inherit(self, known: int, page: int) -> bool:
        """Tables still see the other's window page: it cannot be given away."""
        return bool(self.page_map[known]) or not self.page_map[page]

    def slots(self, slots: Tensor) -> Tensor:
        """The slots of the sliding-window layers for these slots of the pool: int64, on the CPU."""
        pages, offsets = np.divmod(slots.cpu().numpy(), self.page_size)
        return torch.from_numpy(self.page_map[pages].astype(np.int64) * self.page_size + offsets)

    def check(self, tables: Iterable[Table], free: Collection[int], cached: Collection[int]) -> None:
        """See :class:`~foresay.kvpaging.verbs.Store`."""
        seen = Counter(page for table in tables for page in table.pages[self.first_page(table.length) :])
        seen.update(self.filling)
        own = self.page_map[self.page_map != NONE].tolist()
        assert sorted([*own, *self._free]) == list(range(1, self.num_pages)), "a window page is lost or held twice"
        for page, count in enumerate(self._seen):
            kept, idle = bool(self.page_map[page]), page in self._passed or page in self._left
            right = count == seen[page] and (count > 0) + idle == kept
            assert right, f"page {page}: seen by {count}, found {seen[page]}, window page {self.page_map[page]}"
        assert not any(self.page_map[page] for page in free), "a free page has a window page"

    def _take(self) -> int:
        if not self._free:
            self.forget(next(iter(self._passed or self._left)))
        return self._free.pop()


class TableWindow(TableState):
    """What one table sees: its pages from ``first`` to ``stop``."""

    __slots__ = ("_first", "_kind", "_pages", "_stop")

    def __init__(self, kind: WindowPages, pages: list[int]) -> None:
        self._kind, self._pages = kind, pages
        self._first = self._stop = 0

    def reserve(self, fresh: int, steps: int) -> None:
        """There is a window page for each fresh page."""
        if fresh and fresh > (available := self._kind.available):
            raise OutOfPages(f"{fresh} pages of windows needed, {available} of {self._kind.num_pages - 1} available")

    def commit(self, length: int, count: int) -> None:
        """See what the next row attends to, and what comes after it; and no other pages."""
        kind, pages, first = self._kind, self._pages, self._kind.first_page(length)
        if first == self._first and count == self._stop:
            return
        for page in pages[self._first : min(first, self._stop)]:
            kind.release(page, passed=True)
        for page in reversed(pages[max(count, self._first) : self._stop]):
            kind.release(page, passed=False)
        kind.acquire(pages[first : min(self._first, count)])
        kind.acquire(pages[max(self._stop, first) : count])
        self._first, self._stop = first, count

    def restore(self, length: int) -> int:
        """See :class:`~foresay.kvpaging.verbs.TableState`."""
        kind, size = self._kind, self._kind.page_size
        if kind.page_map[self._pages[kind.first_page(length) : -(-length // size)]].all():
            return length
        return size * kind.restorable(self._pages[: length // size])
