"""Token ids in, token ids out: the layer below HTTP, so that another server can host it.

:func:`generate` is the whole of it for one request. :class:`Generation` is the same for the several requests (choices)
of one answer, with the finer control a text layer needs: batches per engine step, a timeout for pings, an early end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from server.errors import EngineFailed, SlowReader
from spec.request import Delta, Request

MOST_PENDING_TOKENS = 8192


class Sink(Protocol):
    """Where an engine puts what becomes of one request. Neither method may block."""

    def put(self, delta: Delta) -> None:
        """More tokens, or the end."""
        ...

    def fail(self, error: Exception) -> None:
        """No delta will follow."""
        ...


class TokenEngine(Protocol):
    """An engine seen from the event loop. No method waits; results come through the sink."""

    def add(self, request: Request, sink: Sink) -> None:
        """Begin a request; raises :class:`~server.errors.Unavailable` if the engine takes none now."""
        ...

    def cancel(self, id: str) -> None:
        """Drop a request; its sink hears no more. Unknown ids are ignored."""
        ...

    def finish(self, id: str, at_token: int) -> None:
        """End a request after its output token number ``at_token``; the last delta still comes."""
        ...


class Mailbox:
    """The deltas of one request that its reader has not taken yet, merged into one; bounded by ``most`` tokens."""

    def __init__(
        self, engine: TokenEngine, request: Request, wake: asyncio.Event, most: int, spend: Callable[[int], None]
    ) -> None:
        self.request = request
        self.begun = self.finished = False
        self.error: Exception | None = None
        self._engine = engine
        self._wake = wake
        self._most = most
        self._spend = spend
        self._pending: Delta | None = None

    def put(self, delta: Delta) -> None:
        """Merge a delta into what is waiting. A reader too far behind loses the request."""
        if self.finished:
            return
        self.begun = True
        self._spend(len(delta.tokens))
        self._pending = delta if self._pending is None else _merged(self._pending, delta)
        self._wake.set()
        if delta.finish_reason == "error":
            delta.finish_reason = None
            self.fail(EngineFailed(delta.error or "the engine gave up on this request"))
        elif delta.finish_reason is not None:
            self.finished = True
        elif len(self._pending.tokens) > self._most:
            self._engine.cancel(self.request.id)
            self.fail(SlowReader(f"the client left more than {self._most} tokens unread"))

    def fail(self, error: Exception) -> None:
        """End the request with an error, raised once what came before it has been taken."""
        self.finished, self.error = True, error
        self._wake.set()

    def take(self) -> Delta | None:
        """What is waiting, or None."""
        delta, self._pending = self._pending, None
        return delta

    def abandon(self) -> None:
        """Nobody will read on: free the engine of the request if it is still running."""
        if not self.finished:
            self.finished = True
            self._engine.cancel(self.request.id)


class Generation:
    """The running requests of one answer. Leaving the context cancels what is still running.

    spend: called with the number of tokens of each delta, when it comes.

    ``async with Generation(engine, requests) as generation: batch = await generation.next()``
    """

    def __init__(
        self,
        engine: TokenEngine,
        requests: Sequence[Request],
        most_pending: int = MOST_PENDING_TOKENS,
        spend: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._engine = engine
        self._wake = asyncio.Event()
        self._mailboxes = [Mailbox(engine, request, self._wake, most_pending, spend) for request in requests]

    @property
    def begun(self) -> bool:
        """Whether any token has come."""
        return any(mailbox.begun for mailbox in self._mailboxes)

    async def __aenter__(self) -> Self:
        try:
            for mailbox in self._mailboxes:
                self._engine.add(mailbox.request, mailbox)
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()

    async def next(self, timeout: float | None = None) -> list[tuple[int, Delta]]:
        """The next deltas with the index of their request; empty if none came within ``timeout`` seconds.

        Raises what a request failed with: :class:`~spec.errors.InvalidRequest`, :class:`~server.errors.ApiError`.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        taken = [(index, mailbox.take()) for index, mailbox in enumerate(self._mailboxes)]
        batch = [(index, delta) for index, delta in taken if delta is not None]
        error = next((mailbox.error for mailbox in self._mailboxes if mailbox.error is not None), None)
        if error is not None:
            if not batch:
                raise error
            self._wake.set()  # first what came before the error, the error on the next call
        return batch

    def finish(self, index: int, at_token: int) -> None:
        """The text of request ``index`` ends after its output token number ``at_token``."""
        self._engine.finish(self._mailboxes[index].request.id, at_token)

    def abort(self, error: Exception) -> None:
        """End every running request with ``error``."""
        for mailbox in self._mailboxes:
            if not mailbox.finished:
                mailbox.abandon()
                mailbox.fail(error)

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


def _merged(first: Delta, second: Delta) -> Delta:
    """One delta that says what both say. Reuses ``second``, whose end-of-request fields are the newer ones."""
    second.tokens = first.tokens + second.tokens
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    second.prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    return second
