"""Answers that wait to be checked: bounded in number and memory, the oldest give way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from server.engine.generation import Sink
from server.gateway.caller import REQUEST_ID
from server.observe.selfcheck.answer import Answer
from spec.request import Delta, Request

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

    def put(self, answer: Answer) -> None:
        """Keep an answer; the oldest give way if there is too much."""
        packed = msgspec.msgpack.encode(answer)
        self._packed.append(packed)
        self._added(packed)

    def take(self) -> Answer:
        """The oldest. IndexError if there is none."""
        answer: Answer = msgspec.msgpack.decode(self._popped(), type=Answer)
        return answer

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

    def __init__(self, request: Request, sink: Sink, keep: Callable[[Answer], None]) -> None:
        self._request, self._sink, self._keep = request, sink, keep
        self._request_id = REQUEST_ID.get("")
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

    def _answer(self, seed: int, length: int) -> Answer:
        params = msgspec.structs.replace(self._request.params, seed=seed)
        asked = msgspec.structs.replace(self._request, params=params)
        return Answer(asked, self._tokens[:length], self._request_id)
