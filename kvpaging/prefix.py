"""The prefix index: full pages of committed text, found by their tokens.

    digest[i] = blake2b(digest[i - 1], tokens of page i)        digest[-1] = blake2b(salt)

A digest covers a page's tokens and everything before them, so a chain of hits is a common prefix. Salts separate
tenants. A hit counts only if the tokens and the parent's digest are equal too. The index holds one reference per page;
pages without other references are idle and the pool evicts them, least recently released first. Tables release their
pages last to first, so the tail of a text is evicted before its head.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from foresay.kvpaging.disk import DiskPages, Loaded, PageText
from foresay.kvpaging.pool import PagePool
from foresay.kvpaging.table import PageTable
from foresay.kvpaging.verbs import OutOfPages

_TOKEN = np.dtype("<i8")  # tokens are hashed as little-endian 64-bit integers, on every machine


#: Files are read this many pages ahead.
_AHEAD = 8
#: What is loaded of a page that is in the pool.
_THERE = Future[Loaded]()
_THERE.set_result({})
#: The most seconds that a text waits for a page, and that other requests wait for the page being written.
_PATIENCE, _WRITING = 5.0, 0.002


class _Entry(NamedTuple):
    """A page and its text."""

    page: int
    text: PageText


class PrefixIndex:
    """Finds the pages of texts seen before.

    queries, hits: tokens looked up and tokens found, since the start. known: tokens of the text looked up last whose
    pages are there, even if it cannot continue from their end. disk: where pages are also kept; None: nowhere. held:
    the pages that :meth:`fetch` holds a reference to. fetched: pages that it has read of the text requested last.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0
        self.hits = 0
        self.known = 0
        self.disk: DiskPages | None = None
        self.held: list[int] = []
        self.fetched = 0
        self._dirty: dict[int, None] = {}  # pages that are new, or were used, since the last write to disk
        self._private: set[int] = set()  # pages of texts that may not be written to disk, and of no other
        self._entries, self._digests = dict[bytes, _Entry](), dict[int, bytes]()
        pool.attach_cache(self)

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, page: object) -> bool:
        return page in self._digests

    def __iter__(self) -> Iterator[int]:
        """The pages the index refers to."""
        return iter(self._digests)

    def match(self, tokens: Sequence[int], salt: str = "", drafts: bool = False) -> list[int]:
        """The pages of the longest known prefix of `tokens`, each retained for the caller.

        Covers at most len(tokens) - 1 tokens, since the last one must be computed to sample its successor; and ends at
        the largest checkpoint that all stores have. drafts: those that texts are drafted from too.
        """
        pages: list[int] = []
        for text in self._texts(tokens, salt):
            entry = self._entries.get(text.digest)
            if entry is None or entry.text != text:
                break
            pages.append(entry.page)
        self.known = len(pages) * self.pool.page_size
        needed, before = [store for store in self.pool.stores if drafts or not store.drafts], -1
        while before != (before := len(pages)):
            for store in needed:
                del pages[store.restorable(pages) :]
        for page in pages:
            self.pool.retain(page)
            self._dirty[page] = None
        self.queries += len(tokens)
        self.hits += len(pages) * self.pool.page_size
        return pages

    def publish(self, table: PageTable, tokens: Sequence[int], salt: str = "", private: bool = False) -> None:
        """Index the full pages below `table.length`; `tokens` are the sequence's, at least `table.length` of them.

        Pass the same salt each time for one table. Pages already published cost nothing. If another page with the same
        text is indexed, that one stays, and inherits what only the new one has in each store; where that is impossible,
        the new one replaces it. Publish only text that can no longer be cut by a stop string. private: a page is not
        written to disk until a text that may be has it too.
        """
        chain, count = table.chain, table.length // self.pool.page_size
        if len(chain) >= count:
            return
        assert len(tokens) >= table.length
        before = chain[-1] if chain else _root(salt)
        for text in _texts(tokens, self.pool.page_size, before, len(chain), count):
            entry, page = self._entries.get(text.digest), table.pages[text.depth]
            if entry is not None and entry.text != text:
                return  # two texts with the same digest: the second and everything after it is not indexed
            hidden = private and (entry is None or entry.page in self._private)
            if entry and entry.page != page and not all(each.inherit(entry.page, page) for each in self.pool.stores):
                self.pool.replace(entry.page, page)
                entry = None
            known = (entry or self._add(page, text)).page
            if known != page or (known in self._private and not hidden):
                self._dirty[known] = None
            (self._private.add if hidden else self._private.discard)(known)
            chain.append(text.digest)
            for state in table.states:
                state.checkpoint(len(chain) * self.pool.page_size, known)

    def forget(self, page: int) -> None:
        """Drop a page's entry. For the pool, which takes over the reference."""
        del self._entries[self._digests.pop(page)]
        self._dirty.pop(page, None)
        self._private.discard(page)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def fetch(
        self, disk: DiskPages, tokens: Sequence[int], salt: str = "", drafts: bool = False
    ) -> Generator[Future[Any] | None]:
        """Read the pages of a text that are on disk but not in the pool, until one is in neither; yields, between two
        slices of work, what to wait for. All pages of the text are held until the generator ends or is closed. drafts:
        see :meth:`match`."""
        texts, self.fetched = self._texts(tokens, salt), 0
        try:
            for text in texts:
                if not self._hold(text):
                    if disk.has(text, drafts):
                        yield from self._read(disk, chain((text,), texts), drafts)
                    return
                if drafts and not all(store.restorable(self.held[-1:]) for store in self.pool.stores if store.drafts):
                    return
                yield None
        finally:
            while self.held:
                self.pool.release(self.held.pop())

    def _read(self, disk: DiskPages, texts: Iterator[PageText], drafts: bool) -> Iterator[Future[Any] | None]:
        loads = deque(self._begin_loading(disk, islice(texts, _AHEAD), drafts))
        while loads:
            text, page, loading = loads.popleft()
            until = time.perf_counter() + _PATIENCE
            while not loading.done():
                if time.perf_counter() > until:
                    for *_, later in loads:
                        later.cancel()
                    return disk.on_hang(loading, self.fetched + 1)
                yield loading
            if not self._hold(text):
                yield from self._fill(disk, text, page, loading.result())
            if text.digest not in self._entries:
                return None
            self.fetched += 1
            loads.extend(self._begin_loading(disk, islice(texts, 1), drafts))
        return None

    def _begin_loading(
        self, disk: DiskPages, texts: Iterator[PageText], drafts: bool
    ) -> Iterator[tuple[PageText, int, Future[Loaded]]]:
        """Allocate a page for each that the pool lacks and start to load it, as long as there are free pages."""
        for text in texts:
            if self._hold(text):
                yield text, self.held[-1], _THERE
                continue
            try:
                self.held += self.pool.allocate(1)
            except OutOfPages:
                return
            yield text, self.held[-1], disk.load(text, self.held[-1], drafts)

    def _fill(self, disk: DiskPages, text: PageText, page: int, loaded: Loaded) -> Iterator[Future[None] | None]:
        """Fill the page and index it, if the data is complete."""
        if not loaded:
            return
        yield from disk.fill(page, loaded)
        if not self._hold(text):  # it was not computed meanwhile
            self._add(page, text)

    def _texts(self, tokens: Sequence[int], salt: str) -> Iterator[PageText]:
        """All full pages except one that holds the last token."""
        size = self.pool.page_size
        return _texts(tokens, size, _root(salt), 0, max(len(tokens) - 1, 0) // size)

    def _hold(self, text: PageText) -> bool:
        """Hold the page if it is in the pool; returns whether it is."""
        if (entry := self._entries.get(text.digest)) is not None:
            self.pool.retain(entry.page)
            self.held.append(entry.page)
        return entry is not None

    def write_one(self) -> bool:
        """Write one page that is new to disk, or note its use there; returns whether there are more, or it is not
        written yet."""
        if self.disk is None or not self.disk.can_write(_WRITING):
            return self.disk is not None
        if self._dirty:
            page = next(iter(self._dirty))
            del self._dirty[page]
            if page not in self._private:
                for store in self.pool.stores:
                    store.flush(page)
                self.disk.write(page, self._entries[self._digests[page]].text)
        return bool(self._dirty) or not self.disk.can_write(0)

    def page_of(self, digest: bytes) -> int | None:
        """The page that a text up to there is found by; None if it is not."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.page

    def _add(self, page: int, text: PageText) -> _Entry:
        assert page not in self._digests, "a page has one text"
        self._entries[text.digest] = entry = _Entry(page, text)
        self._digests[page] = text.digest
        self._dirty[page] = None
        self.pool.retain(page)
        return entry


def digests(tokens: Sequence[int], page_size: int, salt: str = "", most: int | None = None) -> Iterator[bytes]:
    """The digests of a text's full pages, for a router that holds no KV itself. most: at most this many pages, from the
    first."""
    count = len(tokens) // page_size
    count = count if most is None else min(count, most)
    return (text.digest for text in _texts(tokens, page_size, _root(salt), 0, count))


def _texts(tokens: Sequence[int], page_size: int, parent: bytes, start: int, stop: int) -> Iterator[PageText]:
    """Pages start .. stop - 1 of a text. parent: the digest of what is before them."""
    width = page_size * _TOKEN.itemsize
    data = np.asarray(tokens[start * page_size : stop * page_size], dtype=_TOKEN).tobytes()
    for depth, at in enumerate(range(0, len(data), width), start):
        content = data[at : at + width]
        yield (text := PageText(_digest(parent, content), parent + content, depth))
        parent = text.digest


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=16, person=b"kvpaging root").digest()


def _digest(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=16).digest()
