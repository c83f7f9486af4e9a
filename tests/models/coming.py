"""A model that comes and goes at the word of a test, and who asks for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from foresay.server.engine_process.client_base import Resumed
from foresay.server.models.residency import Keep, NoMemory, NotRestored, Residency, Resident
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import Footprint

#: What there is room for on every device of these tests.
CAPACITY = 100


class Comer(Resident):
    """A resident that takes ``size`` of its device.

    happened: what became of all of them, in order. held: by those that are loaded, by device; none may ever be more
    than there is room for. known: whether its footprint is known before it was loaded once. wrong: why it does not
    load, or cannot even be prepared.
    """

    footprint: Footprint | None = None
    happened: list[str]
    held: dict[str, int]

    def __init__(self, name: str, size: int = 60, device: str = "cpu", known: bool = True, wrong: str = "") -> None:
        super().__init__(name)
        self.size, self.device = size, device
        self.footprint = Footprint(size, CAPACITY, device) if known else None
        self.wrong: ForesayError | None = ConfigurationError(wrong) if wrong else None
        self.unprepared: ForesayError | None = None
        self.seconds, self.there = 0.0, False

    async def prepare(self) -> None:
        await asyncio.sleep(0)
        if self.unprepared is not None:
            raise self.unprepared

    async def load(self, beside: dict[str, int]) -> None:
        others = beside.get(self.device, 0)
        self.footprint = Footprint(self.size, CAPACITY, self.device)
        await asyncio.sleep(self.seconds)
        if self.wrong is not None:
            raise self.wrong
        if others and others + self.size > CAPACITY:
            raise NoMemory(f"{self.name} does not fit beside {others}")
        self.there = True
        self.held[self.device] = self.held.get(self.device, 0) + self.size
        self.happened.append(f"+{self.name}")

    async def unload(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.there:
            self.there = False
            self.held[self.device] -= self.size
            self.happened.append(f"-{self.name}")


class World:
    """A residency with its models. now: its clock, which only the tests move."""

    def __init__(self, comers: Sequence[Comer], most: int | None = None, keep: float | None = None) -> None:
        self.now = 0.0
        self.happened: list[str] = []
        self.loaded: dict[str, int] = {}
        for comer in comers:
            comer.happened, comer.held = self.happened, self.loaded
            comer.enter(keep, "out")
        self.comers = {comer.name: comer for comer in comers}
        self.residents: dict[str, Resident] = {**self.comers}
        self.residency = Residency(list(self.residents.values()), most, lambda: self.now)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.residency.run())
        try:
            yield
            assert not task.done() or task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def leased(self, name: str, keep: Keep = "usual") -> AsyncIterator[None]:
        resident = self.residents[name]
        with await self.residency.lease(resident, keep):
            assert resident.state in ("in", "leaving")
            yield

    async def ask(self, name: str, seconds: float = 0.0, keep: Keep = "usual") -> str:
        """A request that runs so long."""
        async with self.leased(name, keep):
            await asyncio.sleep(seconds)
        return name

    async def reload(self, name: str, comer: Comer, moves: bool = True) -> None:
        """The model becomes what ``comer`` says; the one before comes again if that does not load."""
        resident = self.comers[name]

        async def swap(beside: dict[str, int]) -> Resumed:
            was_there, before = resident.there, (resident.size, resident.wrong)
            await resident.unload()
            resident.size, resident.wrong = comer.size, comer.wrong
            try:
                if not was_there:
                    return Resumed(0, 0.0)
                await resident.load(beside)
            except ForesayError as error:
                resident.size, resident.wrong = before
                try:
                    await resident.load(beside)
                except ForesayError:
                    raise NotRestored(str(error)) from None
                raise error from None
            return Resumed(resident.leases, 1.0)

        await self.residency.reload(resident, swap, moves)

    def pass_by(self, seconds: float) -> None:
        """Time goes by, and somebody looks."""
        self.now += seconds
        self.residency._changed.set()

    async def settle(self, true: Callable[[], bool] = lambda: False) -> None:
        """Until it is so, or whatever can happen without more time has happened."""
        for _ in range(200):
            if true():
                return
            await asyncio.sleep(0)
