"""One sequence's pages and committed length.

    position    0 ......... length ............ capacity
                committed   scratch (tree rows)

Rows below `length` are the sequence's text and may be in pages shared with others; rows from `length` on are private
scratch. `reserve` ensures that before anything is written, `commit` raises `length`, `trim` releases what the step did
not need, and rollback is `truncate`: no row is touched, only marks and references.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foresay.kvpaging.pool import OutOfPages, PagePool
from foresay.kvpaging.states import TextState


class PageTable:
    """The pages of one sequence, in order of position.

    pages: page ids, owned by this class; each holds one reference of this table.
    length: committed tokens, that is, positions whose rows belong to the text.
    chain: prefix digests of the leading pages already published; kept here for `PrefixIndex`.
    full: for each store, how many leading pages are known to be full; kept here for `KVStore`.
    state: of recurrent layers, if there are any.
    """

    __slots__ = ("_seen", "_writable", "chain", "full", "length", "pages", "pool", "state")

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0
        self.chain: list[bytes] = []
        self.full: dict[object, int] = {}
        self.state = None if pool.states is None else TextState(pool.states)
        self._writable = 0  # rows [length, _writable) are reserved
        self._seen = 0  # leading pages that no sliding window covers any more

    @property
    def capacity(self) -> int:
        """Tokens that fit in the pages held."""
        return len(self.pages) * self.pool.page_size

    @property
    def reach(self) -> int:
        """Tokens that the text can go on from: fewer than committed if recurrent layers have no state of the last."""
        return self.length if self.state is None else min(self.length, self.state.at)

    def reserve(self, extra: int) -> None:
        """Make positions `length` .. `length + extra - 1` writable, and private to this sequence.

        Call it before each write past `length`. A partial last page that is shared is copied, in all stores.
        Raises OutOfPages with nothing changed.
        """
        if self.state is not None and not self.state.reserve():
            raise OutOfPages("all state pages are in use")
        need = self.pool.pages_for(self.length + extra) - len(self.pages)
        last, offset = divmod(self.length, self.pool.page_size)
        if extra and offset:
            if self.pool.references(self.pages[last]) > 1:
                self._copy_last(need)
                need = 0
            else:
                # If it was truncated while shared, the page may still have marks of text that this sequence dropped.
                self.pool.clamp(self.pages[last], offset)
        if need > 0:
            self.pages += self._allocate(need)
        self._writable = max(self._writable, self.length + extra)

    def commit(self, n: int) -> None:
        """Make the next `n` reserved positions text. Their rows stay where they are."""
        assert 0 <= n <= self._writable - self.length, f"{n} tokens committed, {self._writable - self.length} reserved"
        self.length += n
        if (windows := self.pool.windows) is not None:
            first = windows.first(self.length)
            for page in self.pages[self._seen : first]:
                windows.unsee(page, passed=True)
            self._seen = first

    def truncate(self, length: int) -> None:
        """Roll back to `length` tokens and release the pages after them.

        Rolls back further if the text could not continue there: because sliding-window layers no longer have rows that
        the next one attends to, or recurrent layers have no state there.
        """
        assert 0 <= length <= self.length
        windows = self.pool.windows
        length = length if windows is None else windows.within(self.pages, length)
        length = length if self.state is None else self.state.rewind(length)
        self.length = self._writable = length
        self.trim()
        if windows is not None:
            first = windows.first(length)
            windows.see(self.pages[first : self._seen])
            self._seen = first
        whole, offset = divmod(length, self.pool.page_size)
        del self.chain[whole:]
        for store, count in self.full.items():
            self.full[store] = min(count, whole)
        if offset and self.pool.references(self.pages[whole]) == 1:
            self.pool.clamp(self.pages[whole], offset)

    def trim(self, ahead: int = 0) -> None:
        """Release the pages past ceil((length + ahead) / page_size). ahead: rows that may still be written."""
        self._shrink(self.pool.pages_for(self.length + ahead))

    def fork(self) -> PageTable:
        """A second sequence with the same text, sharing all its pages. Both need `reserve` before they write again."""
        self.trim()
        self._writable = self.length
        other = PageTable(self.pool)
        for page in self.pages:
            self.pool.retain(page)
        other.adopt(self.pages, self.length)
        if self.state is not None and other.state is not None:
            other.state.release()  # the one adopted from a checkpoint
            other.state = self.state.fork()
        other.chain = list(self.chain)
        other.full = dict(self.full)
        return other

    def release(self) -> None:
        """Release all pages; the table is empty afterwards."""
        self.truncate(0)

    def adopt(self, pages: Sequence[int], length: int) -> None:
        """Start from `length` tokens in `pages`, taking over the caller's references (from `PrefixIndex.match`)."""
        assert not self.pages, "adopt is for an empty table"
        assert self.pool.pages_for(length) == len(pages), f"{len(pages)} pages for {length} tokens"
        self.pages += pages
        self.length = self._writable = length
        if (windows := self.pool.windows) is not None:
            self._seen = windows.first(length)
            windows.see(pages[self._seen :])
        if self.state is not None and pages and pages[-1] in self.state.pages.checkpoints:
            self.state.adopt(length, self.state.pages.use(pages[-1]))

    def slots(self, start: int, stop: int) -> Tensor:
        """The slots of positions start .. stop - 1: int64 [stop - start] on the CPU."""
        assert 0 <= start <= stop <= self.capacity, f"positions {start} .. {stop} of {self.capacity}"
        size, first = self.pool.page_size, start // self.pool.page_size
        pages = np.array(self.pages[first : self.pool.pages_for(stop)], np.int64)
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        return torch.from_numpy(slots[start - first * size : stop - first * size])

    def _copy_last(self, need: int) -> None:
        """Replace the shared partial last page with a copy, and append `need` pages."""
        last, offset = divmod(self.length, self.pool.page_size)
        assert last == len(self.pages) - 1, "a shared page is followed by nothing"
        source = self.pages[last]
        pages = self._allocate(1 + max(need, 0))
        self.pool.copy(source, pages[0], rows=offset)
        self._shrink(last)
        self.pages += pages

    def _allocate(self, n: int) -> list[int]:
        """Allocate pages, with window pages if there are any."""
        windows = self.pool.windows
        if windows is not None and n > windows.available:
            raise OutOfPages(f"{n} pages of windows needed, {windows.available} of {windows.num_pages - 1} available")
        pages = self.pool.allocate(n)
        if windows is not None:
            windows.see(pages)
        return pages

    def _shrink(self, count: int) -> None:
        """Release the pages from index `count` on, last to first."""
        if count >= len(self.pages):
            return
        windows = self.pool.windows
        for index in reversed(range(count, len(self.pages))):
            if windows is not None and index >= self._seen:
                windows.unsee(self.pages[index], passed=False)
            self.pool.release(self.pages[index])
        del self.pages[count:]
        self._writable = min(self._writable, self.capacity)
