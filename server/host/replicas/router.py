"""Which replica gets a request: the one with the least work until its first token.

Work is measured in prompt tokens. A replica that caches the first pages of the prompt need not compute them; other
waiting or decoding requests add work. So a conversation stays where it began, a shared prompt spreads as soon as one
replica is busy, and an unknown text goes to the least loaded replica.

A replica is assumed to cache what it was sent: as many pages as its KV cache holds, most recently used. Page digests
are salted as the engine's are (:mod:`foresay.kvpaging.prefix`), so routing reveals nothing of other tenants' texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from foresay.kvpaging.prefix import digests

#: Most pages of a prompt that are hashed: each takes a microsecond, during which streams wait.
MOST_PAGES = 1024
#: Cost of each decoding sequence to a prefill, and of each request that waits for a batch slot, in tokens.
DECODING_COST, WAITING_COST = 32, 512


class ReplicaLoad(NamedTuple):
    """A replica's load now. requests: that it has. slots: requests it runs at once. unread: prompt tokens not yet
    prefilled. pages: of its KV cache."""

    requests: int
    slots: int
    unread: int = 0
    pages: int = 1 << 20


class Router:
    """Remembers which pages were sent where. page_size: tokens of a page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._there: dict[str, OrderedDict[bytes, None]] = {}  # by replica, most recently used last

    def choose(self, prompt: Sequence[int], salt: str, loads: Mapping[str, ReplicaLoad]) -> str:
        """The replica for a prompt, out of ``loads``; the prompt counts as sent there."""
        for gone in self._there.keys() - loads.keys():
            del self._there[gone]
        pages = list(digests(prompt, self._page_size, salt, MOST_PAGES))
        chosen = min(loads, key=lambda name: (self._to_do(name, len(prompt), pages, loads[name]), name))
        self._sent(chosen, pages, loads[chosen].pages)
        return chosen

    def known(self, name: str, pages: Sequence[bytes]) -> int:
        """How many of the first pages a replica caches."""
        there = self._there.get(name) or ()
        return next((index for index, page in enumerate(pages) if page not in there), len(pages))

    def _to_do(self, name: str, tokens: int, pages: Sequence[bytes], load: ReplicaLoad) -> int:
        missing = tokens - self.known(name, pages) * self._page_size
        waiting = max(0, load.requests + 1 - load.slots)
        return missing + load.unread + DECODING_COST * min(load.requests, load.slots) + WAITING_COST * waiting

    def _sent(self, name: str, pages: Sequence[bytes], most: int) -> None:
        there = self._there.setdefault(name, OrderedDict())
        for page in reversed(pages):  # the tail of a text is evicted before its head
            there[page] = None
            there.move_to_end(page)
        while len(there) > most:
            there.popitem(last=False)
