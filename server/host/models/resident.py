"""One model as the residency sees it, what it asks of a model, and what it gives to a request: a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, Protocol, TypeVar

from foresay.spec.errors import ForesayError
from foresay.spec.request import Footprint

# -- waiting for a model -----------------------------------------------------------------------------------------------


T = TypeVar("T")


class Heartbeat:
    """beat: called every ``seconds`` while a request waits, the first time after ``first``; nothing is, without one."""

    def __init__(
        self, beat: Callable[[], Awaitable[None]] | None = None, first: float = 1.0, seconds: float = 15.0
    ) -> None:
        self._beat, self._next, self._seconds = beat, first, seconds

    @property
    def seconds(self) -> float | None:
        """Until the next beat."""
        return None if self._beat is None else self._next

    async def beat(self) -> None:
        """Tell the client that it is not forgotten."""
        assert self._beat is not None, "without a beat nobody calls this"
        self._next = self._seconds
        await self._beat()


async def patiently(awaited: asyncio.Future[T], patience: Heartbeat) -> T:
    """The result of ``awaited``, which is left alone if the task that waits is cancelled: others may wait for it."""
    while not awaited.done():
        done, _ = await asyncio.wait({awaited}, timeout=patience.seconds)
        if not done:
            await patience.beat()
    return awaited.result()


# -- one model and its leases ------------------------------------------------------------------------------------------

Standing = Literal["out", "coming", "in", "leaving"]
#: How long a model stays without a request: seconds, None for ever, or as it does anyway.
Keep = float | None | Literal["usual"]


class Loadable(Protocol):
    """What comes and goes."""

    @property
    def footprint(self) -> Footprint | None:
        """What it holds when it is loaded; None until that was planned once."""
        ...

    async def prepare(self) -> None:
        """Fetch all that can be had without loading; raises a :class:`ForesayError` if it will not work."""
        ...

    async def load(self, beside: dict[str, int]) -> None:
        """Return when it is ready; raises a :class:`ForesayError` if it will not be, NoPlace if only because of others.

        beside: bytes that others hold, by device.
        """
        ...

    async def pause(self) -> None:
        """Return when what it held is free; whatever runs waits for the one that takes over."""
        ...

    async def unload(self) -> None:
        """Return when what it held is free; whatever runs fails."""
        ...


class NoPlace(ForesayError):
    """It would fit, but not beside the others; its footprint says what it would hold."""


class Lease:
    """A model that may not leave, until this is given back: when its engine has no more to do for the request."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give it back; once is enough."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Waiter(NamedTuple):
    """A request that waits for its model. number: those that came before have lower ones. turn: done when it may run,
    with what it has a lease of, or with why not."""

    number: int
    turn: asyncio.Future[Resident]


#: Called in the moment in which requests begin to go to the second in place of the first.
Follow = Callable[["Resident", "Resident"], None]


class Renewal(NamedTuple):
    """A model, and another that is to have its requests. beside: it may get ready beside the one before. moves: those
    that run go on in it at once, else they end where they are. done: when it has them."""

    before: Resident
    after: Resident
    beside: bool
    moves: bool
    follow: Follow
    done: asyncio.Future[None]

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        if self.done.done():  # nobody waits any more
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Resident:
    """One model as the residency sees it. Nobody else changes it.

    standing: see above. leases: requests that run. used: when the last one began or ended. keep: seconds it stays
    without a request; None: for ever. failure: why it could not be loaded the last time, None if it could; until
    refused_until nobody tries again. successor: what has its requests; None as long as it has them itself. moved: that
    has its leases, too.
    """

    def __init__(self, name: str, model: Loadable, keep: float | None = None, standing: Standing = "out") -> None:
        self.name, self.model, self.usual_keep, self.standing = name, model, keep, standing
        self.keep = None if standing == "in" else keep  # one that is there from the start may be loading yet
        self.leases, self.used = 0, 0.0
        self.waiting: list[Waiter] = []
        self.pause, self.refused_until = 0.0, 0.0
        self.failure: str | None = None
        self.preparing: asyncio.Task[None] | None = None
        self.successor: Resident | None = None
        self.moved = False

    @property
    def latest(self) -> Resident:
        """What has the requests that were its own."""
        return self if self.successor is None else self.successor.latest

    @property
    def holder(self) -> Resident:
        """What has the leases that were given of it."""
        return self.successor.holder if self.moved and self.successor is not None else self

    @property
    def idle(self) -> bool:
        """Whether it is in and nobody uses it."""
        return self.standing == "in" and not self.leases

    def stays(self, now: float) -> float | None:
        """Seconds that it stays if nobody asks for it any more; None for ever."""
        return None if self.keep is None else max(0.0, (self.used if self.idle else now) + self.keep - now)

    @property
    def leaves_at(self) -> float | None:
        """When it leaves if nobody asks for it; None if that is not known."""
        return None if self.keep is None or not self.idle else self.used + self.keep
