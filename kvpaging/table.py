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

from foresay.kvpaging.pool import PagePool
from foresay.kvpaging.verbs import TableState


class PageTable:
    """The pages of one sequence, in order of position.

    pages: page ids, owned by this class; each holds one reference of this table.
    length: committed tokens, that is, positions whose rows belong to the text.
    chain: prefix digests of the leading pages already published; kept here for `PrefixIndex`.
    full: for each store, how many leading pages are known to be full; kept here for `KVStore`.
    states: what else the text has in stores of the pool.
    """

    __slots__ = ("_writable", "chain", "full", "length", "pages", "pool", "states")

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0
        self.chain: list[bytes] = []
        self.full: dict[object, int] = {}
        besides = [store.table_state(self.pages) for store in pool.stores]
        self.states: tuple[TableState, ...] = tuple(filter(None, besides))
        self._writable = 0  # rows [length, _writable) are reserved

    @property
    def capacity(self) -> int:
        """Tokens that fit in the pages held."""
        return len(self.pages) * self.pool.page_size

    def reserve(self, extra: int, steps: int = 0) -> None:
        """Make positions `length` .. `length + extra - 1` writable, and private to this sequence.

        Call it before each write past `length`. A partial last page that is shared is copied, in all stores. steps: see
        :meth:`foresay.kvpaging.verbs.TableState.reserve`. Raises OutOfPages with nothing changed.
        """
        last, offset = divmod(self.length, self.pool.page_size)
        partial = bool(extra and offset)
        shared = partial and self.pool.references(self.pages[last]) > 1
        fresh = shared + max(self.pool.pages_for(self.length + extra) - len(self.pages), 0)
        for state in self.states:
            state.reserve(fresh, steps)
        if partial and not shared:
            # If it was truncated while shared, the page may still have marks of text that this sequence dropped.
            self.pool.clamp(self.pages[last], offset)
        if fresh:
            self.pages += self.pool.allocate(fresh)
            self._commit()
        if shared:  # the copy is the first fresh page, and takes its place
            self.pool.copy(self.pages[last], self.pages[last + 1], offset)
            self.pages.append(self.pages.pop(last))
            self._shrink(len(self.pages) - 1)
        self._writable = max(self._writable, self.length + extra)

    def commit(self, n: int) -> None:
        """Make the next `n` reserved positions text. Their rows stay where they are."""
        assert 0 <= n <= self._writable - self.length, f"{n} tokens committed, {self._writable - self.length} reserved"
        self.length += n
        self._commit()

    def truncate(self, length: int) -> None:
        """Roll back to `length` tokens and release the pages after them; further if the text could not continue there:
        to where all of its states can."""
        assert 0 <= length <= self.length
        while (least := min((state.restore(length) for state in self.states), default=length)) < length:
            length = least
        self.length = self._writable = length
        self.trim()
        self._commit()
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
        other.pages += self.pages
        other.length = other._writable = self.length
        for mine, its in zip(self.states, other.states, strict=True):
            mine.fork(its)
        other._commit()
        other.chain, other.full = list(self.chain), dict(self.full)
        return other

    def release(self) -> None:
        """Release all pages; the table is empty afterwards."""
        self.truncate(0)

    def adopt(self, pages: Sequence[int], length: int, known: int = 0) -> None:
        """Start from `length` tokens in `pages`, taking over the caller's references (from `PrefixIndex.match`). known:
        tokens of the text whose pages are cached."""
        assert not self.pages, "adopt is for an empty table"
        assert self.pool.pages_for(length) == len(pages), f"{len(pages)} pages for {length} tokens"
        self.pages += pages
        self.length = self._writable = length
        for state in self.states:
            state.adopt(pages, known)
        self._commit()

    def align_chunk(self, rows: int) -> int:
        """The number of prompt rows, reduced to end where a checkpoint is made."""
        return min((state.align_chunk(rows) for state in self.states), default=rows)

    def slots(self, start: int, stop: int) -> Tensor:
        """The slots of positions start .. stop - 1: int64 [stop - start] on the CPU."""
        assert 0 <= start <= stop <= self.capacity, f"positions {start} .. {stop} of {self.capacity}"
        size, first = self.pool.page_size, start // self.pool.page_size
        pages = np.array(self.pages[first : self.pool.pages_for(stop)], np.int64)
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        return torch.from_numpy(slots[start - first * size : stop - first * size])

    def _commit(self) -> None:
        for state in self.states:
            state.commit(self.length, len(self.pages))

    def _shrink(self, count: int) -> None:
        """Release the pages from index `count` on, last to first."""
        if count >= len(self.pages):
            return
        for state in self.states:
            state.commit(self.length, count)
        for page in reversed(self.pages[count:]):
            self.pool.release(page)
        del self.pages[count:]
        self._writable = min(self._writable, self.capacity)
