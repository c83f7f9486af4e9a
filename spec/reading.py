"""Prompts whose KV is on disk: who is next has it read back before it starts, a few pages between two steps."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from foresay.kvpaging import DiskPages, PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.sequence import SequenceState

#: Seconds that others wait for it in each step: those that decode, and those who only cancel or ask whether we live.
_DECODING, _OTHERS = 0.002, 0.1
#: After so many pages it is known whether reading takes less time than computing does.
_KNOWN = 8


class DiskReader:
    """Of one sequence at a time. chunk: rows of a prompt that would be computed at once."""

    def __init__(self, prefix: PrefixIndex, cost: CostModel, chunk: int) -> None:
        self._prefix, self._cost, self._chunk = prefix, cost, chunk
        self._sequence: SequenceState | None = None
        self._pages: Generator[None] | None = None
        self._count = self._slow = 0

    def of(self, sequence: SequenceState) -> bool:
        """Whether it has begun with this one."""
        return sequence is self._sequence

    def go_on(self, sequence: SequenceState, decoding: bool) -> bool:
        """Read for a while; whether that is done. What is read is found by ``match`` from then on. decoding: whether
        others do."""
        if (disk := self._prefix.disk) is None:
            return True
        if self._pages is None or not self.of(sequence):
            self.stop()
            self._sequence, self._pages = sequence, self._prefix.fetch(disk, sequence.tokens, sequence.salt)
            self._count = self._slow = 0
        done = self._read(disk, self._pages, _DECODING if decoding else _OTHERS)
        if done:
            self.stop()
        return done

    def _read(self, disk: DiskPages, pages: Iterator[None], most: float) -> bool:
        """Whether there is no more, or most pages took longer than they take to compute. most: seconds of it now."""
        now, until = (began := time.perf_counter()), began + most
        computed = self._cost.seconds(self._chunk) / self._chunk * self._prefix.pool.page_size
        while now < until:
            if next(pages, self) is self:
                return True
            now, before = time.perf_counter(), now
            self._count, self._slow = self._count + 1, self._slow + (now - before > computed)
            if self._count >= _KNOWN and 2 * self._slow > self._count:
                disk.slow(self._count)
                return True
        return False

    def stop(self) -> bool:
        """Hold no pages any more; whether it held any. What was read stays while there is room."""
        held = bool(self._prefix.held)
        if self._pages is not None:
            self._pages.close()
        self._sequence = self._pages = None
        return held
