"""A text that was written, the request that writes it again plainly, and those that wait to be checked."""

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
    """request: with the seed that was drawn with. tokens: what was written, as far as it is in the text.

    request_id: the ``X-Request-Id`` of the HTTP request it came with; empty if it came otherwise. tries: re-runs that
    were begun and had to make way.
    """

    request: Request
    tokens: list[int]
    request_id: str = ""
    tries: int = 0

    def plainly(self, id: str) -> Request:
        """The request, called ``id``, that writes these tokens again: one a step, from no KV that is there already.

        A fork is repeated by its own seed. What is only reported (logprobs) is left out.
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
            salt=asked.salt,  # what is compiled for it again tells nobody else
            grammar=asked.grammar,
            speculate=False,
            aside=True,
        )


class Difference(msgspec.Struct, frozen=True):
    """Where a text differs from plain decoding. position: of the output token, from 0 on. written: the token in the
    text. plain: the one that plain decoding writes there; None if it ends before."""

    position: int
    written: int
    plain: int | None


def difference(written: Sequence[int], plain: Sequence[int], begin: int = 0) -> Difference | None:
    """The first difference, if there is one. plain: what plain decoding wrote from position ``begin`` on, so far."""
    for position, token in enumerate(plain, start=begin):
        if token != written[position]:
            return Difference(position, written[position], token)
    return None


# -- decoded again, compared as it comes -------------------------------------------------------------------------------


#: compared: to its end, or to the first difference. interrupted: somebody needed the engine. lost: it failed.
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
        """Compare what came."""
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
        """It is over; whatever comes later changes nothing."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)


MOST_ANSWERS = 64
MOST_BYTES = 8 << 20


class Backlog:
    """First in, first out. They are held packed, so that their bytes are what they take.

    filled: set while there is one. dropped: how many had to give way, since the start.
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
        """Keep an answer; the oldest give way if there is too much."""
        packed = msgspec.msgpack.encode(answer)
        self._packed.append(packed)
        self._added(packed)

    def take(self) -> RecordedAnswer:
        """The oldest. IndexError if there is none."""
        answer: RecordedAnswer = msgspec.msgpack.decode(self._popped(), type=RecordedAnswer)
        return answer

    def clear(self) -> None:
        """Drop all of them."""
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


#: How a text ends that nobody broke off.
WHOLE = ("stop", "length")


class Recorder:
    """A sink that passes on what it gets. keep: called with the answer; not if the request fails or is cancelled."""

    def __init__(self, request: Request, sink: Sink, keep: Callable[[RecordedAnswer], None]) -> None:
        self._request, self._sink, self._keep = request, sink, keep
        self._request_id = CONTEXT.get().id
        self._tokens: list[int] = []

    def put(self, delta: Delta) -> None:
        """More tokens, or the end."""
        self._tokens += delta.tokens
        whole, length = delta.finish_reason in WHOLE, len(self._tokens)
        if delta.statistics is not None:  # fewer than were written, where a stop string cut them
            length = delta.statistics.completion_tokens
        self._sink.put(delta)
        if whole and length:
            self._keep(self._answer(delta.seed, length))

    def fail(self, error: Exception) -> None:
        """No delta will follow."""
        self._sink.fail(error)

    def _answer(self, seed: int, length: int) -> RecordedAnswer:
        params = msgspec.structs.replace(self._request.params, seed=seed)
        asked = msgspec.structs.replace(self._request, params=params)
        return RecordedAnswer(asked, self._tokens[:length], self._request_id)
