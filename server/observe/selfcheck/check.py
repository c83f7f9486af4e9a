"""The server's self-check: a share of the finished requests is decoded again plainly, while the engine is idle.

::

    request ── CheckedEngine ── Recorder ── answer ──> Backlog ── idle for a moment ──> Rerun ──> SelfCheckCounts,
                   │                                      ^                               │       a warning
                   └── a request comes: the re-run is cancelled at once ──────────────────┘

A re-run goes to the engine directly, bypassing limits, metrics and recent requests. It runs with ``aside``
(:class:`~foresay.spec.request.Request`), so it uses none of the KV cached for the text, and caches none.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count

import msgspec
from aiohttp import web

from foresay.server.engine.generation import ServedEngine, Sink, TokenEngine
from foresay.server.observe.selfcheck.answer import Backlog, Difference, Outcome, RecordedAnswer, Recorder, Rerun
from foresay.server.observe.telemetry.counts import SelfCheckCounts
from foresay.server.schemas.errors import Unavailable
from foresay.spec.request import EngineInfo, Request

#: How long no request has come before a re-run starts, so that it does not run between two requests of one client.
QUIET_SECONDS = 0.5
#: A re-run interrupted this often is given up.
MOST_TRIES = 3
log = logging.getLogger("foresay.selfcheck")


class SelfCheck:
    """engine: generates the texts, and the re-runs. share: of requests that are re-run. idle: set while no request
    runs.
    taking: whether requests are taken."""

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
        self._follows = 0  # how often another model has replaced it
        counts.share = share

    def picked(self, request: Request, sink: Sink) -> Sink:
        """The sink for a request whose answer may be kept: ``sink`` itself, or a recorder around it."""
        if request.forced is None and self._chance() < self._share:
            return Recorder(request, sink, partial(self._keep, self._follows))
        return sink

    def interrupt(self) -> None:
        """A client's request comes: cancel the re-run before the request reaches the engine."""
        self._requests += 1
        self._end_rerun("interrupted")

    def follow(self, engine: ServedEngine, taking: Callable[[], bool], same_texts: bool = False) -> None:
        """Use another engine from now on. Unless it writes the same texts, earlier answers can no longer be checked."""
        self._end_rerun("lost")
        self._engine, self._taking = engine, taking
        if not same_texts:
            self.backlog.clear()
            self._follows += 1
        self._report()

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

    async def _guarded(self, answer: RecordedAnswer) -> None:
        """An internal error in one check must not silently end all checks."""
        try:
            await self._check(answer)
        except Exception:
            log.exception("self-check: the answer to request %s could not be checked", answer.request.id)
            self._counts.skipped += 1
            self._report()

    def _free(self) -> bool:
        """Whether the engine is ready and idle."""
        return self._idle.is_set() and self._taking()

    async def _check(self, answer: RecordedAnswer) -> None:
        """Re-run one answer, and count the outcome."""
        engine, follows, rerun = self._engine, self._follows, Rerun(answer, f"self-check-{next(self._numbers)}")
        try:
            engine.add(rerun.request, rerun)
        except Unavailable:
            self.backlog.put(answer)
            await asyncio.sleep(QUIET_SECONDS)
            return
        self._rerun = rerun
        try:
            outcome = await rerun.outcome()
        finally:
            self._rerun = None
            engine.cancel(rerun.request.id)
        if outcome == "compared":
            self._compared(rerun)
        elif outcome == "interrupted" and answer.tries + 1 < MOST_TRIES:
            self._keep(follows, msgspec.structs.replace(answer, tries=answer.tries + 1))  # others may be shorter
        else:  # too long for the idle times; or it may have killed the engine: do not retry
            self._counts.skipped += 1
        self._report()

    def _compared(self, rerun: Rerun) -> None:
        self._counts.checked += 1
        self._counts.tokens += rerun.tokens
        if rerun.difference is not None:
            self._counts.mismatches += 1
            log.warning("%s", sentence(rerun.answer, rerun.difference, self._engine.info))

    def _end_rerun(self, outcome: Outcome) -> None:
        if self._rerun is not None:
            self._engine.cancel(self._rerun.request.id)
            self._rerun.end(outcome)

    def _keep(self, follows: int, answer: RecordedAnswer) -> None:
        if follows == self._follows:
            self.backlog.put(answer)
            self._report()

    def _report(self) -> None:
        """Update the counts of waiting and dropped answers."""
        self._counts.waiting = len(self.backlog)
        self._counts.skipped += self.backlog.dropped
        self.backlog.dropped = 0


class CheckedEngine:
    """A :class:`~foresay.server.engine.generation.TokenEngine` for clients' requests only. picks: their answers may be
    kept and checked."""

    def __init__(self, check: SelfCheck, engine: TokenEngine, picks: bool = True) -> None:
        self._check, self._engine, self._picks = check, engine, picks
        self.cancel, self.finish = engine.cancel, engine.finish

    def add(self, request: Request, sink: Sink) -> None:
        """Start a client's request, cancelling any re-run."""
        self._check.interrupt()
        self._engine.add(request, self._check.picked(request, sink) if self._picks else sink)


def sentence(answer: RecordedAnswer, found: Difference, info: EngineInfo | None) -> str:
    """The log message about a difference: its position, nothing of the text."""
    request = answer.request
    plain = "plain decoding ends before that" if found.plain is None else "plain decoding writes another token"
    claim = "which claims to be exact" if info is None or info.exact else f"which is not exact: {info.exact_reason}"
    return (
        f"self-check: request {request.id} (X-Request-Id {answer.request_id or '-'}, seed {request.params.seed}) "
        f"differs at output position {found.position}: {plain}, on this machine, {claim}"
    )
