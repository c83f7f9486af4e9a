"""Answers that wait to be checked: bounded in number and memory, the oldest give way."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from server.observe.selfcheck.answer import Answer

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
