"""Prompts whose KV is on disk: the next sequence's is read back before it starts, a few slices between two steps."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from foresay.kvpaging import PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.sequence import SequenceState

#: Seconds it may take in each step: while others decode, and otherwise (cancellations and health checks wait for it).
_DECODING, _OTHERS = 0.002, 0.1
#: The number of pages after which reading is compared with computing.
_KNOWN = 8


class DiskReader:
    """Reads for one sequence at a time. chunk: rows of a prompt that would be computed at once."""

    def __init__(self, prefix: PrefixIndex, cost: CostModel, chunk: int) -> None:
        self._prefix, self._cost, self._chunk = prefix, cost, chunk
        self._sequence: SequenceState | None = None
        self._pages: Generator[Future[Any] | None] | None = None
        self._count = self._slow = 0
        self._spent = 0.0

    def of(self, sequence: SequenceState) -> bool:
        """Whether it is reading for this sequence."""
        return sequence is self._sequence

    def go_on(self, sequence: SequenceState, decoding: bool) -> bool:
        """Read for a while; returns whether it is done. ``match`` finds what was read from then on. decoding: whether
        other sequences decode; then it waits for no file."""
        if (disk := self._prefix.disk) is None:
            return True
        if self._pages is None or not self.of(sequence):
            self.stop()
            text = sequence.tokens, sequence.salt, sequence.drafts
            self._sequence, self._pages = sequence, self._prefix.fetch(disk, *text)
            self._count, self._slow, self._spent = 0, 0, 0.0
        until = (now := time.perf_counter()) + (_DECODING if decoding else _OTHERS)
        for file in self._pages:
            if file is not None:
                with suppress(TimeoutError):
                    file.result(0 if decoding else max(until - time.perf_counter(), 0))
            now, before = time.perf_counter(), now
            if self._is_slow(now - before):
                disk.count_slow(self._count)
                break
            if now >= until or (file is not None and not file.done()):
                return False
        self.stop()
        return True

    def _is_slow(self, spent: float) -> bool:
        """Whether most pages took longer to read than to compute. spent: further seconds."""
        self._spent += spent
        if self._prefix.fetched > self._count:
            computed = self._cost.seconds(self._chunk) / self._chunk * self._prefix.pool.page_size
            self._count, self._slow, self._spent = self._prefix.fetched, self._slow + (self._spent > computed), 0.0
        return self._count >= _KNOWN and 2 * self._slow > self._count

    def stop(self) -> bool:
        """Release the pages it holds; whether it held any. What was read stays while there is room."""
        held = bool(self._prefix.held)
        if self._pages is not None:
            self._pages.close()
        self._sequence = self._pages = None
        return held
