"""A finished answer, the request that decodes it again plainly, and the queue of answers to be checked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from foresay.server.engine.generation import Sink
from foresay.server.gateway.caller import CONTEXT
from foresay.spec.request import Delta, Request


class RecordedAnswer(msgspec.Struct, frozen=True):
    """request: with the seed that was used. tokens: the output, as far as it is in the text.

    request_id: the ``X-Request-Id`` of its HTTP request; empty if it had none. tries: re-runs that were started and
    interrupted.
    """

    request: Request
    tokens: list[int]
    request_id: str = ""
    tries: int = 0

    def plainly(self, id: str) -> Request:
        """The request, with id ``id``, that generates these tokens again: one per step, without cached KV.

        A fork is repeated with its own seed. Logprobs are not requested.
        """
        asked, length = self.request, len(self.tokens)
        params = msgspec.structs.replace(
            asked.params,
            max_tokens=length,
            min_tokens=min(asked.params.min_tokens, length),
            logprobs=None,
            prompt_logprobs=None,
        )
        return Request(
            id=id,
            prompt=asked.prompt,
            params=params,
            salt=asked.salt,  # grammars compiled for it stay within the tenant
            grammar=asked.grammar,
            speculate=False,
            aside=True,
        )


class Difference(msgspec.Struct, frozen=True):
    """Where a text differs from plain decoding. position: of the output token, from 0. written: the token in the text.
    plain: plain decoding's token there; None if it ends before."""

    position: int
    written: int
    plain: int | None


def difference(written: Sequence[int], plain: Sequence[int], begin: int = 0) -> Difference | None:
    """The first difference, if any. plain: plain decoding's tokens so far, from position ``begin`` on."""
    for position, token in enumerate(plain, start=begin):
        if token != written[position]:
            return Difference(position, written[position], token)
    return None


# -- re-run, compared as tokens arrive -------------------------------------------------------------------------------


#: compared: to its end, or to the first difference. interrupted: by a client's request. lost: it failed.
Outcome = Literal["compared", "interrupted", "lost"]


class Rerun:
    """A sink for the plain request. tokens: compared so far; difference: the first one, which ends it."""

    def __init__(self, answer: RecordedAnswer, id: str) -> None:
        self.answer, self.request = answer, answer.plainly(id)
        self.tokens = 0
        self.difference: Difference | None = None
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def outcome(self) -> Outcome:
        """How it ended."""
        return await self._outcome

    def put(self, delta: Delta) -> None:
        if self._outcome.done():
            return
        if delta.finish_reason in ("error", "cancelled"):
            self.end("lost")
            return
        written, length = self.answer.tokens, len(self.answer.tokens)
        self.difference = difference(written, delta.tokens[: length - self.tokens], self.tokens)
        self.tokens += len(delta.tokens)
        if self.difference is not None:
            self.tokens = self.difference.position + 1
        elif delta.finish_reason is not None and self.tokens < length:
            self.difference = Difference(self.tokens, written[self.tokens], None)
        if self.difference is not None or self.tokens >= length:
            self.end("compared")

    def fail(self, error: Exception) -> None:
        """The engine refused it, or died."""
        self.end("lost")

    def end(self, outcome: Outcome) -> None:
        """Set the outcome; further calls do nothing."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)


MOST_ANSWERS = 64
MOST_BYTES = 8 << 20


class Backlog:
    """A first-in, first-out queue. Answers are held encoded, so that their memory is known.

    filled: set while it is not empty. dropped: number of answers evicted.
    """

    def __init__(self, most_answers: int = MOST_ANSWERS, most_bytes: int = MOST_BYTES) -> None:
        self.filled = asyncio.Event()
        self.dropped = 0
        self._most_answers, self._most_bytes = most_answers, most_bytes
        self._packed: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, answer: RecordedAnswer) -> None:
        """Add an answer; the oldest are dropped if there are too many."""
        packed = msgspec.msgpack.encode(answer)
        self._packed.append(packed)
        self._added(packed)

    def take(self) -> RecordedAnswer:
        """Remove and return the oldest. Raises IndexError if there is none."""
        answer: RecordedAnswer = msgspec.msgpack.decode(self._popped(), type=RecordedAnswer)
        return answer

    def clear(self) -> None:
        """Drop all answers."""
        while self._packed:
            self._popped()
            self.dropped += 1

    def _added(self, packed: bytes) -> None:
        self._bytes += len(packed)
        self.filled.set()
        while len(self._packed) > self._most_answers or self._bytes > self._most_bytes:
            self._popped()
            self.dropped += 1

    def _popped(self) -> bytes:
        packed = self._packed.popleft()
        self._bytes -= len(packed)
        if not self._packed:
            self.filled.clear()
        return packed


# -- between the engine and a request's reader -------------------------------------------------------------------------


#: Finish reasons of complete texts.
WHOLE = ("stop", "length")


class Recorder:
    """A sink that passes deltas on and records them. keep: called with the answer, unless the request fails or is
    cancelled."""

    def __init__(self, request: Request, sink: Sink, keep: Callable[[RecordedAnswer], None]) -> None:
        self._request, self._sink, self._keep = request, sink, keep
        self._request_id = CONTEXT.get().id
        self._tokens: list[int] = []

    def put(self, delta: Delta) -> None:
        self._tokens += delta.tokens
        whole, length = delta.finish_reason in WHOLE, len(self._tokens)
        if delta.statistics is not None:  # fewer than generated if a stop string cut them
            length = delta.statistics.completion_tokens
        self._sink.put(delta)
        if whole and length:
            self._keep(self._answer(delta.seed, length))

    def fail(self, error: Exception) -> None:
        self._sink.fail(error)

    def _answer(self, seed: int, length: int) -> RecordedAnswer:
        params = msgspec.structs.replace(self._request.params, seed=seed)
        asked = msgspec.structs.replace(self._request, params=params)
        return RecordedAnswer(asked, self._tokens[:length], self._request_id)
