"""The server's self-check: a share of the finished requests is decoded again plainly, while nobody needs the engine.

::

    request ── add ── Recorder ── answer ──> Backlog ── idle for a moment ──> Rerun ──> SelfCheckCounts, a warning
                │                               ^                               │
                └── a request comes: the re-run is cancelled at once ───────────┘

A re-run goes to the engine directly: limits, metrics and recent requests know nothing of it. It runs aside
(:class:`~spec.request.Request`), so it takes no KV that the text was made with, and leaves none.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from itertools import count

import msgspec
from aiohttp import web

from server.engine.generation import ServedEngine, Sink
from server.observe.selfcheck.answer import Answer, Backlog, Difference, Recorder, Rerun
from server.observe.telemetry.counts import SelfCheckCounts
from server.schemas.errors import Unavailable
from spec.request import EngineInfo, Request

#: Nobody has asked for anything for so long: whoever sends the next request is not kept waiting between two of theirs.
QUIET_SECONDS = 0.5
#: A re-run that had to make way so often is given up.
MOST_TRIES = 3
log = logging.getLogger("foresay.selfcheck")


class SelfCheck:
    """A :class:`~server.engine.generation.TokenEngine` in front of the server's, for the requests of clients alone.

    share: of the requests, those that are re-run. idle: set while no request runs. taking: whether requests are taken.
    """

    def __init__(
        self,
        engine: ServedEngine,
        share: float,
        counts: SelfCheckCounts,
        idle: asyncio.Event,
        taking: Callable[[], bool],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.backlog = Backlog()
        self._engine, self._share, self._counts, self._chance = engine, share, counts, chance
        self._idle, self._taking = idle, taking
        self._rerun: Rerun | None = None
        self._requests, self._numbers = 0, count()
        counts.share = share

    # -- TokenEngine ---------------------------------------------------------------------------------------------

    def add(self, request: Request, sink: Sink) -> None:
        """Begin a client's request, which may be picked. A re-run makes way."""
        if request.forced is None and self._chance() < self._share:
            sink = Recorder(request, sink, self._keep)
        self.pass_by(request, sink)

    def pass_by(self, request: Request, sink: Sink) -> None:
        """Begin a client's request of which nothing may be kept. A re-run makes way."""
        self._requests += 1
        self._interrupt()
        self._engine.add(request, sink)

    def cancel(self, id: str) -> None:
        """Drop a client's request."""
        self._engine.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        """End a client's request after its output token number ``at_token``."""
        self._engine.finish(id, at_token)

    # -- checking ------------------------------------------------------------------------------------------------

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Check while the server runs."""
        checking = asyncio.create_task(self._run()) if self._share else None
        yield
        if checking is not None:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.backlog.filled.wait()
            await self._idle.wait()
            seen = self._requests
            await asyncio.sleep(QUIET_SECONDS)
            while self.backlog and self._free() and self._requests == seen:
                await self._guarded(self.backlog.take())

    async def _guarded(self, answer: Answer) -> None:
        """A fault of ours in one check is no reason to check nothing any more in silence."""
        try:
            await self._check(answer)
        except Exception:
            log.exception("self-check: the answer to request %s could not be checked", answer.request.id)
            self._counts.skipped += 1
            self._tell()

    def _free(self) -> bool:
        """Whether nobody needs the engine, and it is there."""
        return self._idle.is_set() and self._taking()

    async def _check(self, answer: Answer) -> None:
        """Re-run one answer, and count what came of it."""
        rerun = Rerun(answer, f"self-check-{next(self._numbers)}")
        try:
            self._engine.add(rerun.request, rerun)
        except Unavailable:
            self.backlog.put(answer)
            await asyncio.sleep(QUIET_SECONDS)
            return
        self._rerun = rerun
        try:
            outcome = await rerun.outcome()
        finally:
            self._rerun = None
            self._engine.cancel(rerun.request.id)
        if outcome == "compared":
            self._compared(rerun)
        elif outcome == "interrupted" and answer.tries + 1 < MOST_TRIES:
            self.backlog.put(msgspec.structs.replace(answer, tries=answer.tries + 1))  # others may be shorter
        else:  # too long for the breaks there are; or it may be what killed the engine: then once is enough
            self._counts.skipped += 1
        self._tell()

    def _compared(self, rerun: Rerun) -> None:
        self._counts.checked += 1
        self._counts.tokens += rerun.tokens
        if rerun.difference is not None:
            self._counts.mismatches += 1
            log.warning("%s", sentence(rerun.answer, rerun.difference, self._engine.info))

    def _interrupt(self) -> None:
        """A request comes: the engine hears of the end of the re-run before it hears of the request."""
        if self._rerun is not None:
            self._engine.cancel(self._rerun.request.id)
            self._rerun.end("interrupted")

    def _keep(self, answer: Answer) -> None:
        self.backlog.put(answer)
        self._tell()

    def _tell(self) -> None:
        """How many wait, and how many had to give way."""
        self._counts.waiting = len(self.backlog)
        self._counts.skipped += self.backlog.dropped
        self.backlog.dropped = 0


class Unpicked:
    """The engine behind a self-check, for requests of which nothing may be kept."""

    def __init__(self, check: SelfCheck) -> None:
        self.add, self.cancel, self.finish = check.pass_by, check.cancel, check.finish


def sentence(answer: Answer, found: Difference, info: EngineInfo | None) -> str:
    """What the log says about a difference: where it is, nothing of the text."""
    request = answer.request
    plain = "plain decoding ends before it" if found.plain is None else "plain decoding writes another token"
    claim = "which claims to be exact" if info is None or info.exact else f"which is not exact: {info.exact_reason}"
    return (
        f"self-check: request {request.id} (X-Request-Id {answer.request_id or '-'}, seed {request.params.seed}) "
        f"differs at output position {found.position}: {plain}, on this machine, {claim}"
    )
