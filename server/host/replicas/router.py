"""Which replica gets a request: where the least has to be done until its first token.

What has to be done is told in tokens of a prompt. A replica that has the first pages of the prompt need not compute
them; where others wait or write, the request waits too. So a conversation goes on where it began, a prompt that all
share spreads as soon as one replica is busy, and a text that nobody knows goes to whom has least to do.

What a replica has is what it was sent: as many pages as its KV cache holds, those used last. A page's name is salted
as the engine's own are (:mod:`foresay.kvpaging.prefix`), so where a request goes tells nothing of other tenants' texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from foresay.kvpaging.prefix import digests

#: Pages of a prompt that are looked at: naming one takes a microsecond, and streams wait.
MOST_PAGES = 1024
#: What a sequence that writes costs one that reads its prompt, and what it costs to wait for a place, in tokens.
BESIDE, BEHIND = 32, 512


class Standing(NamedTuple):
    """A replica now. load: requests it has. places: of them it runs at once. unread: tokens of prompts that it has not
    read yet. pages: of its KV cache."""

    load: int
    places: int
    unread: int = 0
    pages: int = 1 << 20


class Router:
    """Remembers which pages were sent where. page_size: tokens of a page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._there: dict[str, OrderedDict[bytes, None]] = {}  # by replica, those used last at the end

    def choose(self, prompt: Sequence[int], salt: str, standings: Mapping[str, Standing]) -> str:
        """The replica for a prompt, of those that stand; it counts as sent there."""
        for gone in self._there.keys() - standings.keys():
            del self._there[gone]
        pages = list(digests(prompt, self._page_size, salt, MOST_PAGES))
        chosen = min(standings, key=lambda name: (self._to_do(name, len(prompt), pages, standings[name]), name))
        self._sent(chosen, pages, standings[chosen].pages)
        return chosen

    def known(self, name: str, pages: Sequence[bytes]) -> int:
        """How many of the first pages a replica has."""
        there = self._there.get(name) or ()
        return next((index for index, page in enumerate(pages) if page not in there), len(pages))

    def _to_do(self, name: str, tokens: int, pages: Sequence[bytes], standing: Standing) -> int:
        missing = tokens - self.known(name, pages) * self._page_size
        behind = max(0, standing.load + 1 - standing.places)
        return missing + standing.unread + BESIDE * min(standing.load, standing.places) + BEHIND * behind

    def _sent(self, name: str, pages: Sequence[bytes], most: int) -> None:
        there = self._there.setdefault(name, OrderedDict())
        for page in reversed(pages):  # the tail of a text goes before its head
            there[page] = None
            there.move_to_end(page)
        while len(there) > most:
            there.popitem(last=False)
