"""Waves of clients during kills and freezes of the engine, and whether everything was as it should be.

::

    wave      clients send what was drawn for them, while the engine is killed and frozen
    quiet     everything has ended: no page is held, no request runs, no socket is open
    plain     a server without drafts gets the same requests, one at a time, during the waves
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bench.soak.answers import clipped, difference
from bench.soak.clients import Received, conversation, session, visit
from bench.soak.requests import Json, RequestSource, SoakRequest
from bench.soak.served import Quiet, Served

CLIENTS = 6
VISITS = 6
#: Answers that may wait for their comparison when a wave begins.
MOST_WAITING = 12
#: In an error that ends a stream whatever is done to the engine: plain decoding must report the same.
OF_A_REQUEST = ("invalid", "no token is allowed")
#: How long an engine stays frozen unless it is ended.
FREEZE_SECONDS = (0.2, 3.0)
#: Sockets that the quiet server may have open beyond those at its first quiet moment: the soak's own.
SPARE_DESCRIPTORS = 3


class Harm(NamedTuple):
    """What is done to the engine after so many seconds of a wave: frozen for ``hold`` seconds; None: killed, or a step
    made to fail (``fails``)."""

    seconds: float
    hold: float | None
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. what: in a word. told: in words. how: the request, so that it can be sent again."""

    what: str
    where: str
    told: str
    how: Json = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Counts of what happened, by kind. seconds_down: of each time that the engine was gone. gap: the longest between
    two events of a stream without harm, in seconds; gapped: its request."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds_down: list[float] = field(default_factory=list)
    gap: float = 0.0
    gapped: Json = field(default_factory=dict)


class Plain:
    """A server without drafts, which gets one request at a time. Equal requests are sent once."""

    def __init__(self, port: int) -> None:
        self._client = session(port)
        self._known: dict[str, list[Received]] = {}

    async def close(self) -> None:
        """End its session."""
        await self._client.close()

    async def answers(self, request: SoakRequest) -> list[Received]:
        """The right answer of each turn."""
        key = json.dumps([request.api, request.plain])
        if key not in self._known:
            api = "responses" if request.api == "socket" else request.api
            calm = replace(request, api=api, conduct="reads")
            self._known[key] = await conversation(self._client, calm, request.plain)
        return self._known[key]


class Judge:
    """Compares what clients received with plain decoding, as fast as that goes."""

    def __init__(self, plain: Plain, tally: Tally) -> None:
        self._plain, self._tally = plain, tally
        self._waiting: asyncio.Queue[tuple[str, list[Received]]] = asyncio.Queue()

    @property
    def waiting(self) -> int:
        """Visits still to be compared."""
        return self._waiting.qsize()

    def hand_in(self, where: str, turns: list[Received]) -> None:
        """Add these turns of one conversation to the comparison."""
        self._waiting.put_nowait((where, turns))

    async def kept_up(self) -> None:
        """Wait until few are waiting."""
        while self.waiting > MOST_WAITING:
            await asyncio.sleep(0.1)

    async def settled(self) -> None:
        """Wait until all are compared."""
        await self._waiting.join()

    async def work(self) -> None:
        """Compare for ever."""
        while True:
            where, turns = await self._waiting.get()
            try:
                for received, right in zip(turns, await self._plain.answers(turns[0].request), strict=False):
                    if received.comparable:
                        self.compare(where, received, right)
            finally:
                self._waiting.task_done()

    def compare(self, where: str, received: Received, right: Received) -> None:
        """Compare one turn with the right one."""
        wrong = right.broken or differs(received, right)
        self._tally.counts["compared"] += 1
        self._tally.counts["compared beginnings"] += not received.reply.over and received.reply.error is None
        if wrong:
            self._tally.faults.append(Fault("wrong", where, wrong, described(received)))


def differs(received: Received, right: Received) -> str | None:
    """How a turn differs from the right one, as far as it was received; None if it does not."""
    if received.reply.unlike:
        return received.reply.unlike
    if received.reply.error is not None and not received.lost:
        return difference(received.reason, right.reason, cut=False, where="error")
    if right.reply.error is not None:  # clients that left, or lost the engine, may not have received so much
        return f"an answer instead of {clipped(right.reason)}" if received.reply.over else None
    return difference(received.reply.parts, right.reply.parts, cut=not received.reply.over)


def described(received: Received) -> Json:
    """The request as it was sent, and what its client did."""
    request = received.request
    return {"door": request.api, "conduct": request.conduct, "after": request.after, "body": received.body}


class Round:
    """One server's time. harms: what to do to the engine, in seconds since the last harm or the wave's start."""

    def __init__(self, name: str, served: Served, judge: Judge, tally: Tally, seed: int) -> None:
        self.name, self._served, self._judge, self._tally, self._seed = name, served, judge, tally, seed
        self.quiets: list[Quiet] = []
        self.requests: list[int] = []
        self._harmed: list[tuple[float, float]] = []

    async def run(self, seconds: float, harms: Iterator[Harm]) -> None:
        """Wave after wave, at least one, until the time is over."""
        engine = (await self._served.model())["engine"]
        model = (await self._served.model())["model"]
        requests = [
            RequestSource(f"{self._seed} {self.name} {client}", model, engine["vocab_size"], engine["max_model_len"])
            for client in range(CLIENTS)
        ]
        begun = time.monotonic()
        while not self.quiets or time.monotonic() < begun + seconds:
            await self._wave(requests, harms)
            await self._quiet()
            await self._judge.kept_up()
        for mistake in self._served.mistakes:
            self._fault("mistake in the log", mistake)

    # -- a wave --------------------------------------------------------------------------------------------------

    async def _wave(self, requests: list[RequestSource], harms: Iterator[Harm]) -> None:
        calm = asyncio.Event()
        harming = asyncio.create_task(self._harm(harms, calm))
        try:
            await asyncio.gather(*(self._client(number, one) for number, one in enumerate(requests)))
        finally:
            calm.set()
            await harming

    async def _client(self, number: int, requests: RequestSource) -> None:
        """One client's visits; it waits while the server accepts none."""
        async with session(self._served.port) as client:
            for _ in range(VISITS):
                where = f"{self.name}, wave {len(self.quiets)}, client {number}"
                talks = await visit(client, requests.visit())
                for talk in talks:
                    for received in talk:
                        self._note(where, received)
                    if any(received.comparable for received in talk):
                        self._judge.hand_in(where, talk)
                down = any(received.status == 503 for talk in talks for received in talk)
                while down and not await self._served.ready():
                    await asyncio.sleep(0.2)

    def _note(self, where: str, received: Received) -> None:
        """Count a turn, and check that it ended in a way that is allowed."""
        counts, touched = self._tally.counts, self._touched(received)
        error = str(received.reply.error)
        own = 400 <= received.status < 500 or any(words in error for words in OF_A_REQUEST)
        received.lost = touched and received.reply.error is not None and not own
        counts["requests"] += 1
        counts[received.outcome] += 1
        if received.lost and received.status != 503:  # an accepted request continues in the next engine
            self._tally.faults.append(Fault("lost", where, f"{received.status}: {clipped(error)}", described(received)))
        if received.broken:
            self._tally.faults.append(Fault("broken off", where, received.broken, described(received)))
        elif (received.status >= 500 and not touched) or "made a mistake" in error:
            told = f"{received.status}: {clipped(error)}"
            self._tally.faults.append(Fault("error without a cause", where, told, described(received)))
        if not touched and received.request.conduct == "reads" and received.longest_gap > self._tally.gap:
            self._tally.gap, self._tally.gapped = received.longest_gap, {"where": where, **described(received)}

    def _touched(self, received: Received) -> bool:
        return any(received.begun <= end and begin <= received.ended for begin, end in self._harmed)

    async def _harm(self, harms: Iterator[Harm], calm: asyncio.Event) -> None:
        """Kill and freeze until the wave is over."""
        for harm in harms:
            try:
                async with asyncio.timeout(harm.seconds):
                    await calm.wait()
                return
            except TimeoutError:
                await self._do(harm)

    async def _do(self, harm: Harm) -> None:
        """One kill, failure or freeze; what is sent before the engine is back may be refused."""
        begun, hold = time.monotonic(), harm.hold
        self._harmed.append((begun, float("inf")))
        self._tally.counts["freezes" if hold is not None else "failed steps" if harm.fails else "kills"] += 1
        try:
            down = await (self._served.kill(harm.fails) if hold is None else self._served.freeze(hold))
            if down is not None:
                self._tally.seconds_down.append(down)
                self._tally.counts["frozen engines replaced"] += hold is not None
            elif hold is not None and hold > FREEZE_SECONDS[1]:
                self._fault("not noticed", f"the engine was frozen for {hold:g} s, and nobody replaced it")
        except TimeoutError:
            self._fault("did not come back", "the engine was gone for good")
        self._harmed[-1] = (begun, time.monotonic())

    # -- quiet ---------------------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Check that nothing is left of the wave."""
        allowed = self.quiets[0].descriptors + SPARE_DESCRIPTORS if self.quiets else None
        quiet = await self._served.quiet(allowed)
        self.quiets.append(quiet)
        self.requests.append(self._tally.counts["requests"])
        for name in ("running", "waiting", "sockets", "pages"):
            if getattr(quiet, name):
                self._fault("leaked", f"{getattr(quiet, name)} {name} when all had ended")
        if allowed is not None and quiet.descriptors > allowed:
            self._fault("leaked", f"{quiet.descriptors} descriptors, at first {self.quiets[0].descriptors}")

    def _fault(self, what: str, told: str) -> None:
        self._tally.faults.append(Fault(what, f"{self.name}, wave {len(self.quiets)}", told))


def harms(seed: str, kills: float, freezes: float, timeout: float | None) -> Iterator[Harm]:
    """Kills and freezes at random moments, on average so many a minute; half of the kills are steps that fail.

    timeout: seconds after which the server ends a frozen engine; half of the freezes last longer.
    """
    rng, rate = random.Random(seed), (kills + freezes) / 60
    while rate:
        kill = rng.random() * (kills + freezes) < kills
        hold = 3 * timeout if timeout and rng.random() < 0.5 else rng.uniform(*FREEZE_SECONDS)
        yield Harm(rng.expovariate(rate), None if kill else hold, kill and rng.random() < 0.5)
