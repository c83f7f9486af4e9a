"""The client of one replica of a fleet, which connects to it and exchanges frames with it, as with any engine; and
which replica gets a request: the one with the least work until its first token.

Work is measured in prompt tokens. A replica that caches the first pages of the prompt need not compute them; other
waiting or decoding requests add work. So a conversation stays where it began, a shared prompt spreads as soon as one
replica is busy, and an unknown text goes to the least loaded replica.

A replica is assumed to cache what it was sent: as many pages as its KV cache holds, most recently used. Page digests
are salted as the engine's are (:mod:`foresay.kvpaging.prefix`), so routing reveals nothing of other tenants' texts.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from foresay.kvpaging.prefix import digests
from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import Channel
from foresay.server.engine_process.resumption import ChannelClient, InFlights
from foresay.server.metrics.records import Replica
from foresay.server.replicas.hosted import Address, introduce
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.request import EngineInfo
from foresay.spec.trace import StepTrace

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


#: How long the last step counts as news of other front doors' requests.
STALE_SECONDS = 2.0
#: How long a replica may be silent, and how many pings it gets meanwhile.
SILENT_SECONDS, PINGS = 2.0, 4


class ReplicaClient(ChannelClient):
    """One engine of a fleet. on_ready, on_step: called when it takes requests, and with its steps."""

    def __init__(
        self,
        address: Address,
        most_losses: int,
        on_ready: Callable[[], None],
        on_step: Callable[[ReplicaClient, StepTrace], None],
    ) -> None:
        super().__init__(most_losses)
        self.address = address
        self.status = EngineStatus("loading", "connecting")
        self.info: EngineInfo | None = None
        self.failure: frames.Failed | None = None
        self.last: StepTrace | None = None
        self._on_ready, self._on_step = on_ready, on_step
        self._others, self._stepped_at = 0, 0.0

    async def until_closed(self) -> None:
        """Connect, and use it until it closes. Raises OSError or :class:`foresay.server.schemas.errors.EngineFailed` if
        it cannot be reached, or no longer answers."""
        connection = await introduce(self.address.host, self.address.port, self.address.secret)
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_connection(lambda: Channel(self._received), sock=connection)
        try:
            await self._until_closed_or_silent(self._channel)
        finally:
            self.close()

    async def _until_closed_or_silent(self, channel: Channel) -> None:
        """A frozen replica relays nothing, though its engine may go on. Counts pings, not seconds: what arrived while
        this server itself was stopped is read before the next ping."""
        unanswered = 0
        while not channel.closed.done():
            if unanswered == PINGS:
                raise EngineFailed(f"no answer for {SILENT_SECONDS:g} s")
            channel.send(frames.Ping())
            await asyncio.wait([channel.closed], timeout=SILENT_SECONDS / PINGS)
            unanswered = 0 if channel.received() else unanswered + 1

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
        self.status = EngineStatus("down", "gone")

    @property
    def in_flight(self) -> InFlights:
        """This server's requests in it."""
        return self._in_flight

    @property
    def load(self) -> ReplicaLoad:
        """Its load, for the router."""
        assert self.info is not None, "it is ready"
        others = self._others if time.monotonic() < self._stepped_at + STALE_SECONDS else 0
        pages = self.info.kv_tokens // self.info.page_size
        return ReplicaLoad(len(self.in_flight) + others, self.info.max_seqs, self.in_flight.unread, pages)

    @property
    def report_entry(self) -> Replica:
        """Its state, for the report."""
        assert self.info is not None, "it is ready"
        address, load, slots = self.address, self.load.requests, self.info.max_seqs
        pages = self.last.pages if self.last is not None and load else 0
        return Replica(
            name=address.name,
            address=f"{address.host}:{address.port}",
            drafter=self.info.drafter,
            running=min(load, slots),
            waiting=max(0, load - slots),
            own=len(self.in_flight),
            kv_used=pages * self.info.page_size / self.info.kv_tokens,
        )

    def lose(self, reason: str) -> None:
        """It has ended: fail requests that cannot continue; the others wait to move. If it did not report why, its
        machine may be gone or it was killed: no request is to blame."""
        failed = self.failure or frames.Failed(reason)
        self._lose(failed.message, failed.running)

    def _received(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Ready(info):
                self.info, self.status = info, EngineStatus("ready")
                self._in_flight.ready(len(info.draft_shape), info.fingerprint)
                self._on_ready()
            case frames.Failed():
                self.failure = self.failure or frame  # the first is the engine's, which knows more than its replica
            case _:
                super()._received(frame)

    def _stepped(self, trace: StepTrace) -> None:
        self.last, self._stepped_at = trace, time.monotonic()
        self._others = max(0, trace.running + trace.waiting - len(self.in_flight))
        super()._stepped(trace)
        self._on_step(self, trace)
