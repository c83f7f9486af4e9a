"""Which models are loaded. One place decides who comes, who waits and who has to go; one model comes at a time.

::

    out ──somebody waits──> coming ──ready──> in ──its place is wanted, or nobody asked for long──> leaving ──> out
     ^                        │                ^                                                       │
     └──failed: who waits is told              └──────────who wanted the place has left────────────────┘

A request holds a lease of its model while it runs, and a model that is leased does not leave. While it is leaving no
more leases are given, so that it does leave: who comes then waits. Who has waited longest is served first, so nobody
starves; with each load everybody who waits for that model is served.

One that is to have another's requests comes beside it if there is room for both, else after it. Then that one gets no
more leases, and leaves when it is idle: at once, where whatever runs in it goes on in the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from math import ceil

from foresay.server.host.models.resident import (
    Follow,
    Heartbeat,
    Keep,
    Lease,
    NoPlace,
    Renewal,
    Resident,
    Waiter,
    patiently,
)
from foresay.server.schemas.errors import LoadFailed, Unavailable, going_away
from foresay.server.settings.units import span_in_words
from foresay.spec.errors import ForesayError

#: After a load that failed, nobody tries again for so long; twice as long after each further one.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
log = logging.getLogger("foresay.loading")


class Residency:
    """most: models that may be in at once; None for as many as their footprints leave room for."""

    def __init__(
        self, residents: Sequence[Resident], most: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.residents = list(residents)
        self._most, self._clock = most, clock
        self._changed = asyncio.Event()
        self._closed = False
        self._renewals: deque[Renewal] = deque()
        self._numbers = count()
        for resident in self.residents:
            resident.used = clock()

    # -- requests ------------------------------------------------------------------------------------------------

    async def lease(self, resident: Resident, patience: Heartbeat, keep: Keep = "usual") -> Lease:
        """Lease a model; waits until it is in. keep: how long it stays behind this request, if nobody comes.

        Raises :class:`LoadFailed` if it cannot be loaded. The lease has to be given back.
        """
        resident.keep = resident.usual_keep if keep == "usual" else keep
        given = self._give(resident) if resident.standing == "in" else await self._arrival(resident, patience)
        return Lease(lambda: self._return(given))

    def arrived(self, resident: Resident) -> None:
        """A model that was in from the start is loaded: only now does its time begin."""
        resident.keep, resident.used = resident.usual_keep, self._clock()
        self._changed.set()

    def forget(self, resident: Resident) -> None:
        """Let it leave as soon as nobody uses it."""
        resident.keep = 0.0
        self._changed.set()

    async def renew(self, before: Resident, after: Resident, beside: bool, follow: Follow, moves: bool = False) -> None:
        """Have another get the requests of one, beside which it is loaded if it may be and has room; else once nobody
        uses that one, and who comes meanwhile waits. moves: whatever runs goes on in it, and waits for nobody. Raises a
        :class:`ForesayError` if it cannot be loaded: then all is as it was."""
        renewal = Renewal(before, after, beside, moves, follow, asyncio.get_running_loop().create_future())
        self._renewals.append(renewal)
        self._changed.set()
        await renewal.done

    def close(self) -> None:
        """The server goes away: who waits is told so, and whoever comes later and would have to wait."""
        self._closed = True
        for resident in self.residents:
            self._refuse(resident)

    async def _arrival(self, resident: Resident, patience: Heartbeat) -> Resident:
        """Wait for a lease; returns of what, since another may have its requests by then."""
        self._check(resident)
        waiter = Waiter(next(self._numbers), asyncio.get_running_loop().create_future())
        await patiently(self._prepared(resident), patience)
        self._check(resident)
        return await self._turn(resident.latest, waiter, patience)

    def _check(self, resident: Resident) -> None:
        """Raise for whom it is no use to wait."""
        if self._closed or self._clock() < resident.refused_until:
            raise self._refusal(resident)

    async def _turn(self, resident: Resident, waiter: Waiter, patience: Heartbeat) -> Resident:
        """Wait among the others for the model."""
        if resident.standing == "in":
            return self._give(resident)
        resident.waiting.append(waiter)
        self._changed.set()
        try:
            return await patiently(waiter.turn, patience)
        except BaseException:
            if waiter.turn.done() and waiter.turn.exception() is None:
                self._return(waiter.turn.result())  # it was given, but who asked has left
            raise
        finally:
            if waiter in (waiting := resident.latest.waiting):
                waiting.remove(waiter)
                self._changed.set()

    def _prepared(self, resident: Resident) -> asyncio.Future[None]:
        """Done when the model is ready to be loaded; the same for all who wait."""
        if resident.preparing is None:
            resident.preparing = asyncio.create_task(self._prepare(resident))
            resident.preparing.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        return resident.preparing

    async def _prepare(self, resident: Resident) -> None:
        try:
            await resident.model.prepare()
        except ForesayError as error:
            self._note(resident, error)
            raise self._refusal(resident) from None
        finally:
            resident.preparing = None

    def _give(self, resident: Resident) -> Resident:
        resident.leases += 1
        resident.used = self._clock()
        return resident

    def _return(self, resident: Resident) -> None:
        resident = resident.holder
        resident.leases -= 1
        resident.used = self._clock()
        if not resident.leases:
            self._changed.set()

    def _admit(self, resident: Resident) -> None:
        """It is in: everybody who waits for it may run."""
        resident.standing = "in"
        resident.used = self._clock()
        waiting, resident.waiting = resident.waiting, []
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_result(self._give(resident))

    def _refuse(self, resident: Resident) -> None:
        """Nobody who waits for it will get it."""
        waiting, resident.waiting = resident.waiting, []
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(self._refusal(resident))

    def _refusal(self, resident: Resident) -> Unavailable:
        """Why; an error of its own for each, since what is raised keeps hold of those who raise it."""
        if self._closed:
            return going_away()
        return LoadFailed(resident.name, resident.failure or "", ceil(resident.refused_until - self._clock()))

    # -- coming and going ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load who is waited for, and unload who is not: until cancelled."""
        while True:
            self._changed.clear()
            if (stale := self._stale()) is not None:
                idle = f"{span_in_words(stale.keep or 0.0)} without a request"
                log.info(
                    "%s: unloading, %s", stale.name, "its requests go to another engine" if stale.successor else idle
                )
                await self._unload(stale)
            elif self._renewals:
                await self._renew(self._renewals.popleft())
            elif (wanted := self._wanted()) is not None:
                await self._bring(wanted)
            else:
                await self._pause()

    def _stale(self) -> Resident | None:
        """Whom nobody asked for, for as long as it was to be kept."""
        now = self._clock()
        return next((one for one in self.residents if one.leaves_at is not None and one.leaves_at <= now), None)

    def _wanted(self) -> Resident | None:
        """Whose first request has waited longest."""
        awaited = [one for one in self.residents if one.waiting]
        return min(awaited, key=lambda one: one.waiting[0].number, default=None)

    async def _pause(self) -> None:
        """Until something changes, or somebody becomes stale."""
        ends = [one.leaves_at for one in self.residents if one.leaves_at is not None]
        patience = max(0.0, min(ends) - self._clock()) if ends else None
        try:
            async with asyncio.timeout(patience):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _bring(self, wanted: Resident) -> None:
        """Make room, and load."""
        while (leaving := self._in_the_way(wanted)) is not None:
            if not await self._made_leave(leaving, wanted):
                return
        wanted.standing = "coming"
        try:
            await wanted.model.load(_held(self._others(wanted)))
        except NoPlace as error:
            wanted.standing = "out"
            if self._in_the_way(wanted) is None:  # else, as its footprint is known now, the next look finds who is
                self._note(wanted, error)
                self._refuse(wanted)
        except ForesayError as error:
            wanted.standing = "out"
            self._note(wanted, error)
            self._refuse(wanted)
        else:
            wanted.failure, wanted.pause = None, 0.0
            self._admit(wanted)

    async def _made_leave(self, leaving: Resident, wanted: Resident) -> bool:
        """Let no more in and wait until it is empty; false if nobody waits for its place any more."""
        leaving.standing = "leaving"
        while leaving.leases and wanted.waiting:
            self._changed.clear()
            await self._changed.wait()
        if not wanted.waiting:
            self._admit(leaving)
            return False
        log.info("%s: unloading, to make room for %s", leaving.name, wanted.name)
        await self._unload(leaving)
        return True

    async def _renew(self, renewal: Renewal) -> None:
        """Bring another in the place of one, beside it if there is room for both."""
        before, after = renewal.before, renewal.after
        self.residents.append(after)
        try:
            if before.standing == "out":
                self._follow(renewal, before, after)
                self.residents.remove(before)
            else:
                await after.model.prepare()
                if not await self._came_beside(renewal):
                    await (self._came_at_once if renewal.moves else self._came_after)(renewal)
                self._admit(after)
            renewal.end()
        except ForesayError as error:
            await after.model.unload()
            self.residents.remove(after)
            renewal.end(error)
            if before.successor is after:
                self._follow(renewal, after, before)
            if before.standing != "in":
                await self._bring(before)

    async def _came_beside(self, renewal: Renewal) -> bool:
        """Load it while the one before has the requests; false if there is no room for both."""
        before, after = renewal.before, renewal.after
        if not renewal.beside or (not renewal.moves and self._in_the_way(after) is not None):
            return False
        others = [before, *self._others(before)] if renewal.moves else self._others(after)
        try:
            await after.model.load(_held(others))
        except NoPlace:
            return False
        self._follow(renewal, before, after)
        before.keep = 0.0
        return True

    async def _came_at_once(self, renewal: Renewal) -> None:
        """Load it in the place of the one before, whose requests wait for it."""
        before, after = renewal.before, renewal.after
        await before.model.pause()
        try:
            await after.model.load(_held(self._others(before)))
        except ForesayError:
            before.standing = "coming"
            raise
        self._follow(renewal, before, after)
        self.residents.remove(before)

    async def _came_after(self, renewal: Renewal) -> None:
        """Load it once nobody uses the one before, nor those whose requests that one had got."""
        before, after = renewal.before, renewal.after
        for leaving in [one for one in self.residents if one.latest is before]:
            leaving.standing = "leaving"
            while leaving.leases:
                self._changed.clear()
                await self._changed.wait()
            await self._unload(leaving)
        self._follow(renewal, before, after)
        after.standing = "coming"
        await after.model.load(_held(self._others(after)))
        self.residents.remove(before)

    def _follow(self, renewal: Renewal, before: Resident, after: Resident) -> None:
        """Requests are for another from now on, also those that wait."""
        renewal.follow(before, after)
        before.successor, after.successor = after, None
        after.keep, after.waiting, before.waiting = before.keep, before.waiting, []
        if renewal.moves:
            after.leases, before.leases, before.moved = after.leases + before.leases, 0, True

    async def _unload(self, resident: Resident) -> None:
        resident.standing = "leaving"
        await resident.model.unload()
        resident.standing = "out"
        if resident.successor is not None:
            self.residents.remove(resident)

    def _in_the_way(self, wanted: Resident) -> Resident | None:
        """Who has to go before ``wanted`` can come; None if there is room, or nobody left to go. Whoever is not in use
        goes first, of those the least recently used."""
        there = [one for one in self.residents if one.standing == "in" and one is not wanted]
        if self._most is not None:
            return _least_recently_used(there) if len(there) >= self._most else None
        need = wanted.model.footprint
        if need is None:
            return None  # it says so itself if there is no room
        there = [one for one in there if one.model.footprint is None or one.model.footprint.device == need.device]
        held = sum(one.model.footprint.held for one in there if one.model.footprint is not None)
        return _least_recently_used(there) if held + need.held > need.capacity else None

    def _others(self, than: Resident) -> list[Resident]:
        """Beside whom there has to be room; nobody where only their number counts."""
        return [one for one in self.residents if self._most is None and one is not than and one.standing == "in"]

    def _note(self, resident: Resident, error: ForesayError) -> None:
        """It could not be loaded: whoever asks for it in the next seconds is told so, too."""
        resident.pause = min(2 * resident.pause or FIRST_PAUSE, LONGEST_PAUSE)
        resident.refused_until = self._clock() + resident.pause
        resident.failure = str(error)
        log.error("%s", self._refusal(resident).message)


def _held(residents: Sequence[Resident]) -> dict[str, int]:
    """What they hold, by device."""
    held: Counter[str] = Counter()
    for footprint in (one.model.footprint for one in residents):
        if footprint is not None:
            held[footprint.device] += footprint.held
    return dict(held)


def _least_recently_used(residents: Sequence[Resident]) -> Resident | None:
    return min(residents, key=lambda one: (one.leases > 0, one.used), default=None)
