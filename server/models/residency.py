"""Which models are loaded. The residency alone decides what to load and unload; one model loads at a time.

::

    out ──a request waits─> coming ──ready──> in ──its memory is needed, or it was idle for long──> leaving ──> out
     ^                        │                ^                                                       │
     └──failed: waiting requests fail          └──────────the request that needed it has left──────────┘

A request holds a lease of its model while it runs, and a leased model is not unloaded. A model that is leaving gives no
more leases: new requests for it wait. The request that has waited longest decides what is loaded next, so none starves;
each load serves all requests that wait for that model.

A model that is to run with other settings gives no more leases until its next engine is ready, or the one before again;
leases that it has given hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import count
from math import ceil
from typing import Literal, NamedTuple

from foresay.server.engine_process.client_base import Resumed
from foresay.server.schemas.errors import LoadFailed, Unavailable, going_away
from foresay.server.settings.units import span_in_words
from foresay.spec.errors import ForesayError
from foresay.spec.request import Footprint

#: Pause after a failed load; doubled by each further failure.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
log = logging.getLogger("foresay.loading")

# -- one model and its leases ------------------------------------------------------------------------------------------

#: How long a model stays loaded without a request: seconds, None: for ever, or its usual time.
Keep = float | None | Literal["usual"]


class NotRestored(ForesayError):
    """Neither the new settings of a model nor the earlier ones make an engine: it is not loaded."""


class NoMemory(ForesayError):
    """It would fit alone, but not alongside the others; its footprint says what it would hold."""


class Lease(ExitStack):
    """A request's hold on its model, which stays loaded until it is closed: when the engine is done with the request.
    Closing it again does nothing. waited: seconds for the model."""

    waited = 0.0


class Waiter(NamedTuple):
    """A request that waits for its model. number: in order of arrival. turn: done when it may run, with its lease
    taken, or with why not."""

    number: int
    turn: asyncio.Future[None]


#: Replaces a model's engine, given the bytes that other models hold, by device.
Swap = Callable[[dict[str, int]], Awaitable[Resumed]]


class Resident(ABC):
    """A model that can be loaded and unloaded, with its entry in the residency, which alone changes that.

    state: see above. leases: running requests. used: when the last one began or ended. keep: seconds it stays
    loaded without a request; None: for ever. failure: why the last load failed, None if it did not; no retry before
    refused_until, ``delay`` seconds after it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.enter(None, "out")
        self.leases, self.used = 0, 0.0
        self.waiting: list[Waiter] = []
        self.delay, self.refused_until = 0.0, 0.0
        self.failure: str | None = None
        self.preparing: asyncio.Task[None] | None = None

    def enter(self, keep: float | None, state: Literal["out", "coming", "in", "leaving"]) -> None:
        """Set how long it usually stays loaded without a request, and its first state."""
        self.usual_keep, self.state = keep, state
        self.keep = None if state == "in" else keep  # a model of the start may still be loading

    @property
    @abstractmethod
    def footprint(self) -> Footprint | None:
        """What it holds when loaded; None until first planned."""

    @abstractmethod
    async def prepare(self) -> None:
        """Download and read what needs no engine; raises :class:`ForesayError` on failure."""

    @abstractmethod
    async def load(self, reserved: dict[str, int]) -> None:
        """Return when it is ready; raises :class:`ForesayError` if it cannot be, NoMemory if only for lack of memory.

        reserved: bytes that other models hold, by device.
        """

    @abstractmethod
    async def unload(self) -> None:
        """Return when its memory is free; running requests fail."""

    @property
    def loaded(self) -> bool:
        """Whether it is loaded, or was meant to be from the start."""
        return self.state == "in"

    @property
    def idle(self) -> bool:
        """Whether it is loaded and not leased."""
        return self.loaded and not self.leases

    def stays(self, now: float) -> float | None:
        """Seconds that it stays loaded without further requests; None: for ever."""
        return None if self.keep is None else max(0.0, (self.used if self.idle else now) + self.keep - now)

    @property
    def leaves_at(self) -> float | None:
        """When it is unloaded without further requests; None if not known."""
        return None if self.keep is None or not self.idle else self.used + self.keep


# -- all of them -------------------------------------------------------------------------------------------------------


class Residency:
    """most: models that may be loaded at once; None: limited only by their footprints."""

    def __init__(
        self, residents: Sequence[Resident], most: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.residents = list(residents)
        self._most, self._clock = most, clock
        self._changed = asyncio.Event()
        self._closed = False
        self._loading = asyncio.Lock()  # held while a model comes or goes
        self._numbers = count()
        for resident in self.residents:
            resident.used = clock()

    # -- requests ------------------------------------------------------------------------------------------------

    async def lease(self, resident: Resident, keep: Keep = "usual") -> Lease:
        """Lease a model; waits until it is loaded. keep: how long it stays loaded after this request without another.

        Raises :class:`LoadFailed` if it cannot be loaded. The lease must be closed.
        """
        resident.keep = resident.usual_keep if keep == "usual" else keep
        if resident.state == "in":
            self._give(resident)
        else:
            await self._arrival(resident)
        lease = Lease()
        lease.callback(self._return, resident)
        return lease

    def arrived(self, resident: Resident) -> None:
        """The model of the server's start is loaded: its idle time starts now."""
        resident.keep, resident.used = resident.usual_keep, self._clock()
        self._changed.set()

    def forget(self, resident: Resident) -> None:
        """Unload it as soon as it is idle."""
        resident.keep = 0.0
        self._changed.set()

    async def reload(self, resident: Resident, swap: Swap, moves: bool) -> Resumed:
        """Have ``swap`` replace its engine, while new requests wait. moves: running ones go on in the next engine, else
        they end first. Raises what ``swap`` raises."""
        async with self._loading:
            loaded = resident.state == "in"
            if loaded:
                resident.state = "coming" if moves else "leaving"
            if loaded and not moves:
                log.info("%s: running requests end before another model comes", resident.name)
                await self._until(lambda: not resident.leases)
            stays = False
            try:
                resumed = await swap(_held(self._others(resident)))
                resident.failure, resident.delay, resident.refused_until = None, 0.0, 0.0  # of the settings before
                stays = True
                return resumed
            except ForesayError as error:
                stays = not isinstance(error, NotRestored)
                raise
            finally:
                if not stays:
                    resident.state = "out"
                elif loaded:
                    self._admit(resident)
                self._changed.set()

    def close(self) -> None:
        """The server shuts down: refuse all requests that wait or would have to."""
        self._closed = True
        for resident in self.residents:
            self._refuse(resident)

    async def _arrival(self, resident: Resident) -> None:
        """Wait for a lease."""
        self._check(resident)
        number = next(self._numbers)
        await asyncio.shield(self._prepared(resident))
        self._check(resident)
        if resident.state == "in":
            self._give(resident)
        else:
            await self._queue(resident, Waiter(number, asyncio.get_running_loop().create_future()))

    def _check(self, resident: Resident) -> None:
        """Raise if waiting is futile."""
        if self._closed or self._clock() < resident.refused_until:
            raise self._refusal(resident)

    async def _queue(self, resident: Resident, waiter: Waiter) -> None:
        """Queue for the model."""
        resident.waiting.append(waiter)
        self._changed.set()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._return(resident)  # granted, but the request has left
            raise
        finally:
            if waiter in resident.waiting:
                resident.waiting.remove(waiter)
                self._changed.set()

    def _prepared(self, resident: Resident) -> asyncio.Future[None]:
        """Done when the model is ready to be loaded; the same for all that wait."""
        if resident.preparing is None:
            resident.preparing = asyncio.create_task(self._prepare(resident))
            resident.preparing.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        return resident.preparing

    async def _prepare(self, resident: Resident) -> None:
        try:
            await resident.prepare()
        except ForesayError as error:
            self._note(resident, error)
            raise self._refusal(resident) from None
        finally:
            resident.preparing = None

    def _give(self, resident: Resident) -> None:
        resident.leases += 1
        resident.used = self._clock()

    def _return(self, resident: Resident) -> None:
        resident.leases -= 1
        resident.used = self._clock()
        if not resident.leases:
            self._changed.set()

    def _admit(self, resident: Resident) -> None:
        """It is loaded: all requests that wait for it may run."""
        resident.state = "in"
        resident.used = self._clock()
        waiting, resident.waiting = resident.waiting, []
        for waiter in waiting:
            if not waiter.turn.done():
                self._give(resident)
                waiter.turn.set_result(None)

    def _refuse(self, resident: Resident) -> None:
        """Fail all requests that wait for it."""
        waiting, resident.waiting = resident.waiting, []
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(self._refusal(resident))

    def _refusal(self, resident: Resident) -> Unavailable:
        """Why; a new error for each, since a raised one keeps its traceback's frames alive."""
        if self._closed:
            return going_away()
        return LoadFailed(resident.name, resident.failure or "", ceil(resident.refused_until - self._clock()))

    # -- coming and going ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load models that requests wait for and unload idle ones, until cancelled."""
        while True:
            self._changed.clear()
            async with self._loading:
                stale, wanted = self._stale(), self._wanted()
                if stale is not None:
                    log.info("%s: unloading, %s without a request", stale.name, span_in_words(stale.keep or 0.0))
                    await self._unload(stale)
                elif wanted is not None:
                    await self._bring(wanted)
            if stale is None and wanted is None:
                await self._pause()

    def _stale(self) -> Resident | None:
        """A model whose time to stay without a request is over."""
        now = self._clock()
        return next((one for one in self.residents if one.leaves_at is not None and one.leaves_at <= now), None)

    def _wanted(self) -> Resident | None:
        """The model whose first request has waited longest."""
        awaited = [one for one in self.residents if one.waiting]
        return min(awaited, key=lambda one: one.waiting[0].number, default=None)

    async def _pause(self) -> None:
        """Wait until something changes, or a model becomes stale."""
        ends = [one.leaves_at for one in self.residents if one.leaves_at is not None]
        seconds = max(0.0, min(ends) - self._clock()) if ends else None
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _bring(self, wanted: Resident) -> None:
        """Make room, and load."""
        while (leaving := self._in_the_way(wanted)) is not None:
            if not await self._made_leave(leaving, wanted):
                return
        wanted.state = "coming"
        try:
            await wanted.load(_held(self._others(wanted)))
        except ForesayError as error:
            wanted.state = "out"
            # If only memory lacks, the footprint, known now, may let the next look make room.
            if not isinstance(error, NoMemory) or self._in_the_way(wanted) is None:
                self._note(wanted, error)
                self._refuse(wanted)
        else:
            wanted.failure, wanted.delay = None, 0.0
            self._admit(wanted)

    async def _made_leave(self, leaving: Resident, wanted: Resident) -> bool:
        """Give no more leases, wait until it is idle and unload it; false if no request needs its memory any more."""
        leaving.state = "leaving"
        await self._until(lambda: not (leaving.leases and wanted.waiting))
        if not wanted.waiting:
            self._admit(leaving)
            return False
        log.info("%s: unloading, to make room for %s", leaving.name, wanted.name)
        await self._unload(leaving)
        return True

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until it is so."""
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def _unload(self, resident: Resident) -> None:
        resident.state = "leaving"
        await resident.unload()
        resident.state = "out"

    def _in_the_way(self, wanted: Resident) -> Resident | None:
        """The model to unload before ``wanted`` can load; None if there is room, or nothing left to unload. Idle models
        go first, the least recently used before others."""
        there = [one for one in self.residents if one.loaded and one is not wanted]
        need = wanted.footprint
        if self._most is not None:
            full = len(there) >= self._most
        elif need is None:
            full = False  # its load raises if there is no room
        else:
            there = [one for one in there if one.footprint is None or one.footprint.device == need.device]
            held = sum(one.footprint.held for one in there if one.footprint is not None)
            full = held + need.held > need.capacity
        return min(there, key=lambda one: (one.leases > 0, one.used), default=None) if full else None

    def _others(self, than: Resident) -> list[Resident]:
        """The models alongside which it must fit; none if only their number counts."""
        return [one for one in self.residents if self._most is None and one is not than and one.state == "in"]

    def _note(self, resident: Resident, error: ForesayError) -> None:
        """It could not be loaded: refuse requests for it during the next seconds, too."""
        resident.delay = min(2 * resident.delay or FIRST_PAUSE, LONGEST_PAUSE)
        resident.refused_until = self._clock() + resident.delay
        resident.failure = str(error)
        log.error("%s", self._refusal(resident).message)


def _held(residents: Sequence[Resident]) -> dict[str, int]:
    """Bytes that they hold, by device."""
    held: Counter[str] = Counter()
    for footprint in (one.footprint for one in residents):
        if footprint is not None:
            held[footprint.device] += footprint.held
    return dict(held)
