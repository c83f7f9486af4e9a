"""Pages of sliding-window layers: fewer than the pool has, since only the end of a text can be attended to.

    pages of a text     3   7   4   9   12        in the pool, in order of position
    window pages        -   -   2   5   1         where those layers keep the same positions; - no longer kept
                                ^ the first that the next row attends to

A page of the pool gets a window page when it is reserved, and has it as long as a table can see it, that is, attend to
it. After that it keeps it until another needs one: pages that texts went past are evicted first, then the ends of
finished texts, each the longest unseen first. So a text can continue only where the pages that its next row attends to
still have theirs, and a prefix is shared up to such a page (`reach`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

#: No window page; also the number of the padding page.
_NONE = 0


class WindowPages:
    """The window pages of one pool, which has ``pool_pages`` pages of ``page_size`` slots.

    num_pages: window pages in all, the padding page 0 among them. window: positions that a row sees, its own included.
    of: int32[pool_pages], the window page of each page of the pool; 0 where there is none. filling: pages whose window
    page is being read back.
    """

    def __init__(self, num_pages: int, window: int, pool_pages: int, page_size: int) -> None:
        assert num_pages > 1
        assert window > 0
        self.num_pages, self.window, self.page_size = num_pages, window, page_size
        self.of = np.zeros(pool_pages, np.int32)
        self.filling: list[int] = []
        self._seen = [0] * pool_pages
        self._free = list(range(num_pages - 1, _NONE, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Window pages that no table sees."""
        return len(self._free) + len(self._passed) + len(self._left)

    def first(self, length: int) -> int:
        """The index of the first of a text's pages that the row at position `length` attends to."""
        return max(length - self.window + 1, 0) // self.page_size

    def see(self, pages: Iterable[int]) -> None:
        """A table starts to see these pages of the pool: those without a window page get one."""
        for page in pages:
            self._passed.pop(page, None)
            self._left.pop(page, None)
            if not self.of[page]:
                self.of[page] = self._take()
            self._seen[page] += 1

    def unsee(self, page: int, passed: bool) -> None:
        """A table no longer sees the page. passed: because its text went on, past the window."""
        self._seen[page] -= 1
        if not self._seen[page]:
            (self._passed if passed else self._left)[page] = None

    @contextmanager
    def filled(self, page: int) -> Iterator[int]:
        """Give a page that no table sees a window page to fill, which is not evicted before the end. Yields the page;
        ``_NONE`` if there is no room."""
        if not self.available:
            yield _NONE
            return
        self.see([page])
        self.filling.append(page)
        try:
            yield page
        finally:
            self.filling.remove(page)
            self.unsee(page, passed=True)

    def forget(self, page: int) -> None:
        """Free the page's window page. For the pool, when the page became free."""
        assert not self._seen[page], f"page {page} is seen"
        self._passed.pop(page, None)
        self._left.pop(page, None)
        if self.of[page]:
            self._free.append(int(self.of[page]))
            self.of[page] = _NONE

    def reach(self, pages: Sequence[int]) -> int:
        """The most leading pages of a text after which it can continue."""
        there = found = 0
        for count, own in enumerate(self.of[pages], 1):
            there = there + 1 if own else 0
            if count - self.first(count * self.page_size) <= there:
                found = count
        return found

    def within(self, pages: Sequence[int], length: int) -> int:
        """The most tokens, up to `length`, after which a text can continue."""
        size = self.page_size
        if self.of[pages[self.first(length) : -(-length // size)]].all():
            return length
        return size * self.reach(pages[: length // size])

    def slots(self, slots: Tensor) -> Tensor:
        """The slots of the sliding-window layers for these slots of the pool: int64, on the CPU."""
        pages, offsets = np.divmod(slots.cpu().numpy(), self.page_size)
        return torch.from_numpy(self.of[pages].astype(np.int64) * self.page_size + offsets)

    def check(self, tables: Iterable[tuple[list[int], int]]) -> None:
        """Check the accounting, given pages and length of every table in use; raises AssertionError with what is
        wrong."""
        seen = Counter(page for pages, length in tables for page in pages[self.first(length) :])
        seen.update(self.filling)
        own = self.of[self.of != _NONE].tolist()
        if sorted([*own, *self._free]) != list(range(1, self.num_pages)):
            raise AssertionError("a window page is lost or held twice")
        for page, count in enumerate(self._seen):
            kept, idle = bool(self.of[page]), page in self._passed or page in self._left
            if count != seen[page] or (count > 0) + idle != kept:
                raise AssertionError(f"page {page}: seen by {count}, found {seen[page]}, window page {self.of[page]}")

    def _take(self) -> int:
        if not self._free:
            self.forget(next(iter(self._passed or self._left)))
        return self._free.pop()
