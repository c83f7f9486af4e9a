"""A model as the residency sees it, and the lease that a request gets."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Literal, NamedTuple, TypeVar

from foresay.server.engine_process.client_base import Resumed
from foresay.spec.errors import ForesayError
from foresay.spec.request import Footprint

# -- waiting for a model -----------------------------------------------------------------------------------------------


T = TypeVar("T")


class Heartbeat:
    """beat: called every ``seconds`` while a request waits, the first time after ``first`` seconds; may be None."""

    def __init__(
        self, beat: Callable[[], Awaitable[None]] | None = None, first: float = 1.0, seconds: float = 15.0
    ) -> None:
        self._send, self._next, self._seconds = beat, first, seconds

    @property
    def seconds(self) -> float | None:
        """Seconds until the next beat; None without one."""
        return None if self._send is None else self._next

    async def beat(self) -> None:
        """Send the client a sign of life."""
        assert self._send is not None, "without a beat nobody calls this"
        self._next = self._seconds
        await self._send()


async def with_heartbeat(awaited: asyncio.Future[T], heartbeat: Heartbeat) -> T:
    """The result of ``awaited``, which is not cancelled with the waiting task: others may wait for it."""
    while not awaited.done():
        done, _ = await asyncio.wait({awaited}, timeout=heartbeat.seconds)
        if not done:
            await heartbeat.beat()
    return awaited.result()


# -- one model and its leases ------------------------------------------------------------------------------------------

LoadState = Literal["out", "coming", "in", "leaving"]
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


class Reload(NamedTuple):
    """A model whose engine is to be replaced. moves: running requests go on in the next engine, else they end in this
    one first. done: what ``swap`` returns or raises."""

    resident: Resident
    swap: Swap
    moves: bool
    done: asyncio.Future[Resumed]

    async def run(self, reserved: dict[str, int]) -> bool:
        """Replace it; false if it is not loaded any more."""
        try:
            resumed = await self.swap(reserved)
        except Exception as error:  # a bug of ours too must not end the residency
            if not self.done.done():  # else cancelled
                self.done.set_exception(error)
            return isinstance(error, ForesayError) and not isinstance(error, NotRestored)
        one = self.resident
        one.failure, one.delay, one.refused_until = None, 0.0, 0.0  # of the settings before
        if not self.done.done():
            self.done.set_result(resumed)
        return True


class Resident(ABC):
    """A model that can be loaded and unloaded, with its entry in the residency, which alone changes that.

    state: see above. leases: running requests. used: when the last one began or ended. keep: seconds it stays
    loaded without a request; None: for ever. failure: why the last load failed, None if it did not; no retry before
    refused_until, ``delay`` seconds after it.
    """

    def __init__(self, name: str, keep: float | None = None, state: LoadState = "out") -> None:
        self.name = name
        self.enter(keep, state)
        self.leases, self.used = 0, 0.0
        self.waiting: list[Waiter] = []
        self.delay, self.refused_until = 0.0, 0.0
        self.failure: str | None = None
        self.preparing: asyncio.Task[None] | None = None

    def enter(self, keep: float | None, state: LoadState) -> None:
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
    def idle(self) -> bool:
        """Whether it is loaded and not leased."""
        return self.state == "in" and not self.leases

    def stays(self, now: float) -> float | None:
        """Seconds that it stays loaded without further requests; None: for ever."""
        return None if self.keep is None else max(0.0, (self.used if self.idle else now) + self.keep - now)

    @property
    def leaves_at(self) -> float | None:
        """When it is unloaded without further requests; None if not known."""
        return None if self.keep is None or not self.idle else self.used + self.keep
