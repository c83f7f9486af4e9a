"""Token ids in, token ids out: the layer below HTTP, which another server could host.

:func:`generate` suffices for one request. :class:`Generation` does the same for several requests (choices) of one
answer, with the finer control a text layer needs: batches per engine step, a timeout for pings, an early end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, Self

import msgspec

from foresay.server.schemas.errors import EngineFailed, SlowReader, TookTooLong, Unavailable
from foresay.server.schemas.shared import PromptProgress
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, EngineInfo, Request

if TYPE_CHECKING:
    from foresay.server.text.choice import Piece


State = Literal["loading", "ready", "down", "failed", "unloaded"]
#: Why an engine is restarted: it exited or was killed, it hung, it could not be started, or it was replaced on purpose.
Cause = Literal["died", "hung", "not_started", "replaced"]


class EngineStatus(msgspec.Struct, frozen=True):
    """The engine's current status. message, share: progress of loading. starts: engine processes started so far. cause:
    why it is about to be restarted, or just was; None otherwise. resumed: requests of the previous engine that continue
    in one that is now ready. Unloaded: there is no process, and should be none."""

    state: State
    message: str = ""
    share: float | None = None
    starts: int = 0
    cause: Cause | None = None
    resumed: int = 0


def unavailable(status: EngineStatus) -> Unavailable:
    """The 503 that says what the engine is doing instead."""
    if status.state == "loading":
        share = "" if status.share is None else f" ({status.share:.0%})"
        return Unavailable(f"Loading model: {status.message}{share}", "loading")
    if status.state == "unloaded":
        return Unavailable("The model is not loaded", "unloaded")
    return Unavailable(f"The engine is down: {status.message}", "engine_down")


def check_comes(status: EngineStatus) -> None:
    """Raise :class:`Unavailable` if there is no engine, and none will start by itself."""
    if status.state in ("failed", "unloaded"):
        raise unavailable(status)


MOST_PENDING_TOKENS = 8192


def _failure(delta: Delta) -> Exception:
    """The exception for a request's error: its own fault, or the engine's."""
    message = delta.error or "the engine gave up on this request"
    return EngineFailed(message) if delta.fault is None else InvalidRequest(*delta.fault)


class Sink(Protocol):
    """Receives the results of one request. Neither method may block."""

    def put(self, delta: Delta) -> None:
        """Receive more tokens, or the end."""

    def fail(self, error: Exception) -> None:
        """No delta will follow."""


class TokenEngine(Protocol):
    """An engine seen from the event loop. No method blocks; results come through the sink."""

    def add(self, request: Request, sink: Sink) -> None:
        """Start an accepted request: in the next engine if none is running now. Raises
        :class:`~foresay.server.schemas.errors.Unavailable` if there will be none."""

    def cancel(self, id: str) -> None:
        """Drop a request; its sink receives nothing more. Unknown ids are ignored."""

    def finish(self, id: str, at_token: int) -> None:
        """End a request after its output token number ``at_token``; the last delta still comes."""


class StatusSource(Protocol):
    """An engine that reports its status. info: None until first ready."""

    @property
    def status(self) -> EngineStatus:
        """Its current status."""

    @property
    def info(self) -> EngineInfo | None:
        """What it runs."""


class ServedEngine(TokenEngine, StatusSource, Protocol):
    """The engine interface that a server needs."""


class RequestCounter(Protocol):
    """Counts one request's results."""

    @property
    def progress(self) -> PromptProgress | None:
        """How far its prompt is read; None if nothing of it is, or if it is another request's."""

    def kept(self, delta: Delta, piece: Piece) -> None:
        """Count one step, and what of it is in the text."""

    def delivered(self, tokens: int) -> None:
        """Count a sent chunk of this many tokens."""


class Mailbox:
    """The unread deltas of one request; bounded by ``most`` tokens."""

    def __init__(
        self,
        engine: TokenEngine,
        request: Request,
        wake: asyncio.Event,
        most: int,
        spend: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self.request = request
        self.begun = self.finished = False
        self.error: Exception | None = None
        self._engine = engine
        self._wake = wake
        self._most = most
        self._spend, self._ended = spend, ended
        self._pending: list[Delta] = []
        self._pending_tokens = 0

    def put(self, delta: Delta) -> None:
        """Keep a delta for the reader. If it is too slow, the request is cancelled."""
        if self.finished:
            return
        self.begun = True
        self._spend(len(delta.tokens))
        self._pending.append(delta)
        self._pending_tokens += len(delta.tokens)
        self._wake.set()
        if delta.finish_reason == "error":
            delta.finish_reason = None
            self.fail(_failure(delta))
        elif delta.finish_reason is not None:
            self._end()
        elif self._pending_tokens > self._most:
            self._engine.cancel(self.request.id)
            self.fail(SlowReader(f"the client left more than {self._most} tokens unread"))

    def fail(self, error: Exception) -> None:
        """End the request with an error, raised after the deltas before it have been taken."""
        self.error = error
        self._wake.set()
        self._end()

    def take(self) -> list[Delta]:
        """Take the unread deltas, in order."""
        taken, self._pending, self._pending_tokens = self._pending, [], 0
        return taken

    def abandon(self) -> None:
        """The reader is gone: cancel the request if it still runs."""
        if not self.finished:
            self._end()
            self._engine.cancel(self.request.id)

    def _end(self) -> None:
        """The engine is done with it."""
        self.finished = True
        self._ended()


class Generation:
    """The running requests of one answer. Leaving the context cancels what is still running.

    spend: called with the number of tokens of each delta on arrival. all_stats: the requests' counters, used by
    whatever turns deltas into text; may be empty. over: called when the engine is done with all of them, though the
    client may not have read everything.

    ``async with Generation(engine, requests) as generation: batch = await generation.next()``
    """

    def __init__(
        self,
        engine: TokenEngine,
        requests: Sequence[Request],
        most_pending: int = MOST_PENDING_TOKENS,
        spend: Callable[[int], None] = lambda tokens: None,
        all_stats: Sequence[RequestCounter] = (),
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._over = engine, over
        self._all_stats = all_stats
        self._wake = asyncio.Event()
        self._mailboxes = [
            Mailbox(engine, request, self._wake, most_pending, spend, self._one_ended) for request in requests
        ]

    @property
    def begun(self) -> bool:
        """Whether any token has arrived."""
        return any(mailbox.begun for mailbox in self._mailboxes)

    @property
    def progress(self) -> PromptProgress | None:
        """How far the prompts are read, all together; None as long as nothing is."""
        known = [one for stats in self._all_stats if (one := stats.progress) is not None]
        if not known:
            return None
        total, cache, processed = (sum(getattr(one, name) for one in known) for name in ("total", "cache", "processed"))
        return PromptProgress(total=total, cache=cache, processed=processed, time_ms=max(one.time_ms for one in known))

    async def __aenter__(self) -> Self:
        try:
            for mailbox in self._mailboxes:
                if not mailbox.finished:
                    self._engine.add(mailbox.request, mailbox)
                await asyncio.sleep(0)  # each of many requests may carry a long prompt; let other tasks run
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._abandon()

    async def next(self, timeout: float | None = None) -> list[tuple[int, Delta]]:
        """The next deltas with the index of their request; empty if none arrives within ``timeout`` seconds.

        Several of one request if the reader was slower than the engine: each is one step, with its own origin.

        Raises what a request failed with: :class:`~foresay.spec.errors.InvalidRequest`,
        :class:`~foresay.server.schemas.errors.ApiError`.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        batch = [(index, delta) for index, mailbox in enumerate(self._mailboxes) for delta in mailbox.take()]
        error = next((mailbox.error for mailbox in self._mailboxes if mailbox.error is not None), None)
        if error is not None:
            if not batch:
                raise error
            self._wake.set()  # deltas first, the error on the next call
        return batch

    def finish(self, index: int, at_token: int) -> None:
        """End the text of request ``index`` after its output token number ``at_token``."""
        self._engine.finish(self._mailboxes[index].request.id, at_token)

    def kept(self, index: int, delta: Delta, piece: Piece) -> None:
        """Count what of a delta is in the text of request ``index``."""
        if self._all_stats:
            self._all_stats[index].kept(delta, piece)

    def delivered(self, index: int, piece: Piece) -> None:
        """Count a chunk of request ``index``."""
        if self._all_stats:
            self._all_stats[index].delivered(len(piece.token_ids))

    def abort(self, error: Exception) -> None:
        """End every running request with ``error``."""
        for mailbox in self._mailboxes:
            if not mailbox.finished:
                mailbox.abandon()
                mailbox.fail(error)

    def _one_ended(self) -> None:
        if all(mailbox.finished for mailbox in self._mailboxes):
            self._over()

    def _abandon(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.abandon()


async def generate(engine: TokenEngine, request: Request) -> AsyncIterator[Delta]:
    """The deltas of one request, the last one with a ``finish_reason``. Closing the iterator cancels the request."""
    async with Generation(engine, [request]) as generation:
        while True:
            for _, delta in await generation.next():
                yield delta
                if delta.finish_reason is not None:
                    return


@contextmanager
def deadline(generation: Generation, seconds: float | None) -> Iterator[None]:
    """End ``generation`` with an error if it runs for so long."""
    if seconds is None:
        yield
        return
    error = TookTooLong(f"The request took longer than {seconds:g} s, the limit of this server")
    timer = asyncio.get_running_loop().call_later(seconds, generation.abort, error)
    try:
        yield
    finally:
        timer.cancel()
