"""The server's self-check: a share of the finished requests is decoded again plainly, while the engine is idle.

::

    choices ── watching ── answers ──> backlog ── idle for a moment ──> plain_tokens ──> SelfCheckCounts,
                   │                      ^                                │             a warning
                   └── a request comes: the re-run is cancelled at once ──┘

A re-run goes to the engine directly, bypassing limits, metrics and recent requests. It runs with ``aside``
(:class:`~foresay.spec.request.Request`), so it uses none of the KV cached for the text, and caches none.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, zip_longest

import msgspec
from aiohttp import web

from foresay.server.engine.generation import Generation, ServedEngine
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.records import SelfCheckCounts
from foresay.server.schemas.errors import ApiError, EngineFailed, Unavailable
from foresay.server.text.choice import Choice
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import EngineInfo, Request


class RecordedAnswer(msgspec.Struct, frozen=True):
    """request: with the seed that was used. tokens: the output, as far as it is in the text.

    request_id: the ``X-Request-Id`` of its HTTP request; empty if it had none. fingerprint: of the engine that wrote
    it.
    """

    request: Request
    tokens: list[int]
    request_id: str = ""
    fingerprint: str = ""

    @classmethod
    def of(cls, choice: Choice, fingerprint: str) -> RecordedAnswer:
        """The answer of a finished choice."""
        params = msgspec.structs.replace(choice.request.params, seed=choice.seed)
        request = msgspec.structs.replace(choice.request, params=params)
        return cls(request, choice.tokens, CONTEXT.get().id, fingerprint)

    def plainly(self, id: str) -> Request:
        """The request, with id ``id``, that generates these tokens again: one per step, without cached KV.

        A fork is repeated with its own seed. Logprobs are not requested.
        """
        request, length = self.request, len(self.tokens)
        params = msgspec.structs.replace(
            request.params,
            max_tokens=length,
            min_tokens=min(request.params.min_tokens, length),
            logprobs=None,
            prompt_logprobs=None,
        )
        return Request(
            id=id,
            prompt=request.prompt,
            params=params,
            salt=request.salt,  # grammars compiled for it stay within the tenant
            grammar=request.grammar,
            speculate=False,
            aside=True,
        )


def difference(written: Sequence[int], plain: Sequence[int]) -> int | None:
    """The position of the first token that differs, if any."""
    pairs = enumerate(zip_longest(written, plain))
    return next((position for position, (one, other) in pairs if one != other), None)


class Interrupted(Exception):
    """A client's request ended the re-run."""


async def plain_tokens(rerun: Generation, length: int) -> list[int]:
    """The first tokens of a re-run. Raises what it failed with."""
    plain: list[int] = []
    async with rerun:
        while len(plain) < length:
            for _, delta in await rerun.next():
                if delta.finish_reason == "cancelled":
                    raise EngineFailed("the re-run was cancelled")
                plain += delta.tokens
                if delta.finish_reason is not None:
                    return plain[:length]
    return plain[:length]


#: Answers that wait to be checked; the oldest are dropped if there are more.
MOST_ANSWERS = 64
#: How long no request has come before a re-run starts, so that it does not run between two requests of one client.
QUIET_SECONDS = 0.5
log = logging.getLogger("foresay.selfcheck")
_random = random.Random()  # apart from the global one, which others may seed


class SelfCheck:
    """engine: generates the texts, and the re-runs. share: of requests that are re-run. idle: set while no request
    runs. taking: whether requests are taken. chance: numbers from 0 to 1."""

    def __init__(
        self,
        engine: ServedEngine,
        share: float,
        counts: SelfCheckCounts,
        idle: asyncio.Event,
        taking: Callable[[], bool],
        chance: Callable[[], float] = _random.random,
    ) -> None:
        self.backlog: deque[RecordedAnswer] = deque(maxlen=MOST_ANSWERS)
        self._filled = asyncio.Event()
        self._engine, self._share, self._counts, self._chance = engine, share, counts, chance
        self._idle, self._taking = idle, taking
        self._rerun: Generation | None = None
        self._requests, self._numbers = 0, count()
        counts.share = share

    @contextmanager
    def watching(self, choices: Sequence[Choice]) -> Iterator[None]:
        """Clients' requests run meanwhile: any re-run is cancelled before they reach the engine, and their answers are
        picked once they are finished."""
        self._requests += 1
        if self._rerun is not None:
            self._rerun.abort(Interrupted())
        fingerprint = self._fingerprint
        try:
            yield
        finally:
            for choice in choices:
                if choice.finished and choice.tokens and self._picks(choice.request):
                    self._put(RecordedAnswer.of(choice, fingerprint))

    def _picks(self, request: Request) -> bool:
        return request.forced is None and not request.private and self._chance() < self._share

    # -- checking ------------------------------------------------------------------------------------------------

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Check while the server runs."""
        checking = asyncio.create_task(self._run())
        yield
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await self._idle.wait()
            seen = self._requests
            await asyncio.sleep(QUIET_SECONDS)
            while self.backlog and self._free() and self._requests == seen:
                await self._check(self.backlog.popleft())
            if not self.backlog:
                self._filled.clear()

    def _free(self) -> bool:
        """Whether the engine is ready and idle."""
        return self._idle.is_set() and self._taking()

    async def _check(self, answer: RecordedAnswer) -> None:
        """Re-run one answer, and count the outcome. An error in one check must not silently end all checks."""
        self._rerun = rerun = Generation(self._engine, [answer.plainly(f"self-check-{next(self._numbers)}")])
        try:
            if answer.fingerprint != self._fingerprint:
                raise EngineFailed("other weights have been loaded")
            self._compare(answer, await plain_tokens(rerun, len(answer.tokens)))
        except (Interrupted, Unavailable):
            self._put(answer)  # last: others may be shorter
            await asyncio.sleep(QUIET_SECONDS)
        except (ApiError, InvalidRequest):  # it may have killed the engine: do not retry
            self._counts.self_check_skipped += 1
        except Exception:
            log.exception("self-check: the answer to request %s could not be checked", answer.request.id)
            self._counts.self_check_skipped += 1
        self._rerun = None
        self._counts.self_check_waiting = len(self.backlog)

    def _compare(self, answer: RecordedAnswer, plain: Sequence[int]) -> None:
        found = difference(answer.tokens, plain)
        self._counts.self_check_requests += 1
        self._counts.self_check_tokens += len(answer.tokens) if found is None else found + 1
        if found is not None:
            self._counts.self_check_mismatch += 1
            log.warning("%s", sentence(answer, found, found == len(plain), self._engine.info))

    @property
    def _fingerprint(self) -> str:
        """Of the engine now."""
        return "" if self._engine.info is None else self._engine.info.fingerprint

    def _put(self, answer: RecordedAnswer) -> None:
        self._counts.self_check_skipped += len(self.backlog) == MOST_ANSWERS
        self.backlog.append(answer)
        self._counts.self_check_waiting = len(self.backlog)
        self._filled.set()


def sentence(answer: RecordedAnswer, position: int, ended: bool, info: EngineInfo | None) -> str:
    """The log message about a difference: its position, nothing of the text. ended: plain decoding's text."""
    request = answer.request
    plain = "plain decoding ends before that" if ended else "plain decoding writes another token"
    claim = "which claims to be exact" if info is None or info.exact else f"which is not exact: {info.exact_reason}"
    return (
        f"self-check: request {request.id} (X-Request-Id {answer.request_id or '-'}, seed {request.params.seed}) "
        f"differs at output position {position}: {plain}, on this machine, {claim}"
    )
