"""The threads that run kernels, and who may use them (:mod:`verifier.ops.kernels.cpu.walk` is what they do)."""

from __future__ import annotations

import os
import threading

import numpy as np
import torch

from verifier.ops.kernels.cpu.walk import PLACES, walker

#: More threads are never used, and kernels that need room for each have room for so many.
MOST = max(os.cpu_count() or 1, 4)


class Threads:
    """So many threads, the caller's among them. One list at a time: see :class:`Team`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._state = np.zeros(len(PLACES) * 8, dtype=np.int64)
        self._state[PLACES["threads"] // 8] = count
        self._at, self._walker = self._state.ctypes.data, walker()
        self._others = [
            threading.Thread(target=_serve, args=(self._state, number), name=f"kernels {number}", daemon=True)
            for number in range(1, count)
        ]
        for thread in self._others:
            thread.start()

    def run(self, entries: int, count: int) -> None:
        """Walk ``count`` pairs of int64 at this address: of a kernel, and of its arguments."""
        if count:  # without a barrier behind an entry the others might still be looking for this list in the next
            self._walker.run(self._at, entries, count)

    def stop(self) -> None:
        """End the threads; nothing can be run any more."""
        self._state[PLACES["stop"] // 8] = 1
        self._walker.run(self._at, 0, 0)
        for thread in self._others:
            thread.join()


def _serve(state: np.ndarray, number: int) -> None:
    """What each of the others does. It holds the memory that it waits at, so that nobody takes that from under it."""
    walker().serve(state.ctypes.data, number)


class Team:
    """The threads of this process: started when they are needed first, and others when another number is wanted.

    Callers in several threads wait for each other.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self.forget()

    def forget(self) -> None:
        """In a child: it has the caller's thread alone, and another may have held the lock."""
        self._lock = threading.Lock()
        self._threads: Threads | None = None

    def use(self, count: int) -> None:
        """Let kernels have so many threads."""
        self._asked = min(count, MOST)

    def wanted(self) -> int:
        """How many kernels have: as many as torch has, unless :meth:`use` said otherwise."""
        return self._asked or min(torch.get_num_threads(), MOST)

    def run(self, entries: int, count: int) -> None:
        """Walk ``count`` pairs of int64 at this address: of a kernel, and of its arguments."""
        with self._lock:
            self._as_many(self.wanted()).run(entries, count)

    def _as_many(self, wanted: int) -> Threads:
        if self._threads is None or self._threads.count != wanted:
            if self._threads is not None:
                self._threads.stop()
            self._threads = Threads(wanted)
        return self._threads


_team = Team()
use, wanted, run = _team.use, _team.wanted, _team.run
os.register_at_fork(after_in_child=_team.forget)
