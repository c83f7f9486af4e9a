"""The server's self-check: a share of the finished requests is decoded again plainly, while nobody needs the engine.

::

    request ── CheckedEngine ── Recorder ── answer ──> Backlog ── idle for a moment ──> Rerun ──> SelfCheckCounts,
                   │                                      ^                               │       a warning
                   └── a request comes: the re-run is cancelled at once ──────────────────┘

A re-run goes to the engine directly: limits, metrics and recent requests know nothing of it. It runs aside
(:class:`~foresay.spec.request.Request`), so it takes no KV that the text was made with, and leaves none.
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

#: Nobody has asked for anything for so long: whoever sends the next request is not kept waiting between two of theirs.
QUIET_SECONDS = 0.5
#: A re-run that had to make way so often is given up.
MOST_TRIES = 3
log = logging.getLogger("foresay.selfcheck")


class SelfCheck:
    """engine: what writes the texts, and plainly again. share: of the requests, those that are re-run. idle: set while
    no request runs. taking: whether requests are taken."""

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
        self._follows = 0  # how often another model came
        counts.share = share

    def picked(self, request: Request, sink: Sink) -> Sink:
        """Where the results of a request go whose answer may be kept."""
        if request.forced is None and self._chance() < self._share:
            return Recorder(request, sink, partial(self._keep, self._follows))
        return sink

    def make_way(self) -> None:
        """A client's request comes: the engine hears of the end of the re-run before it hears of the request."""
        self._requests += 1
        self._end_rerun("interrupted")

    def follow(self, engine: ServedEngine, taking: Callable[[], bool], same_texts: bool = False) -> None:
        """Another engine writes the texts from now on: unless it writes the same, none that was written before can be
        checked any more."""
        self._end_rerun("lost")
        self._engine, self._taking = engine, taking
        if not same_texts:
            self.backlog.clear()
            self._follows += 1
        self._tell()

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

    async def _check(self, answer: RecordedAnswer) -> None:
        """Re-run one answer, and count what came of it."""
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
        else:  # too long for the breaks there are; or it may be what killed the engine: then once is enough
            self._counts.skipped += 1
        self._tell()

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
            self._tell()

    def _tell(self) -> None:
        """How many wait, and how many had to give way."""
        self._counts.waiting = len(self.backlog)
        self._counts.skipped += self.backlog.dropped
        self.backlog.dropped = 0


class CheckedEngine:
    """A :class:`~foresay.server.engine.generation.TokenEngine` for the requests of clients alone. picks: their answers
    may be kept, and checked."""

    def __init__(self, check: SelfCheck, engine: TokenEngine, picks: bool = True) -> None:
        self._check, self._engine, self._picks = check, engine, picks
        self.cancel, self.finish = engine.cancel, engine.finish

    def add(self, request: Request, sink: Sink) -> None:
        """Begin a client's request. A re-run makes way."""
        self._check.make_way()
        self._engine.add(request, self._check.picked(request, sink) if self._picks else sink)


def sentence(answer: RecordedAnswer, found: Difference, info: EngineInfo | None) -> str:
    """What the log says about a difference: where it is, nothing of the text."""
    request = answer.request
    plain = "plain decoding ends before that" if found.plain is None else "plain decoding writes another token"
    claim = "which claims to be exact" if info is None or info.exact else f"which is not exact: {info.exact_reason}"
    return (
        f"self-check: request {request.id} (X-Request-Id {answer.request_id or '-'}, seed {request.params.seed}) "
        f"differs at output position {found.position}: {plain}, on this machine, {claim}"
    )
