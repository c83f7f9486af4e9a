"""The threads that run kernels, and who may use them (:mod:`foresay.verifier.ops.kernels.cpu.walk` is what they do)."""

from __future__ import annotations

import os
import threading

import numpy as np
import torch

from foresay.verifier.ops.kernels.cpu.crowding import Crowding
from foresay.verifier.ops.kernels.cpu.walk import PLACES, walker

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

    def ids(self) -> list[int]:
        """The kernel's numbers of the threads, the caller's first."""
        return [threading.get_native_id(), *(thread.native_id or 0 for thread in self._others)]

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
    """The threads of this process: started when they are needed first, and others when another number is wanted, or
    fits the cores better that something else leaves.

    Callers in several threads wait for each other.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._gives_way = True
        self.forget()

    def forget(self) -> None:
        """In a child: it has the caller's thread alone, and another may have held the lock."""
        self._lock = threading.Lock()
        self._threads: Threads | None = None
        self._crowding: Crowding | None = None

    def use(self, count: int) -> None:
        """Let kernels have so many threads, or fewer while there are no cores for so many."""
        self._asked = min(count, MOST)

    def wanted(self) -> int:
        """How many kernels have: as many as torch has, unless :meth:`use` said otherwise."""
        return self._asked or min(torch.get_num_threads(), MOST)

    def give_way(self, gives_way: bool) -> None:
        """Whether threads for which there is no core are left out (see
        :mod:`~foresay.verifier.ops.kernels.cpu.crowding`)."""
        with self._lock:
            self._gives_way, self._crowding = gives_way, None

    def crowded(self) -> float:
        """Of the time in which the threads could have run lately, the share that they waited for a core."""
        crowding = self._crowding
        return 0.0 if crowding is None else crowding.share

    def run(self, entries: int, count: int) -> None:
        """Walk ``count`` pairs of int64 at this address: of a kernel, and of its arguments."""
        with self._lock:
            self._as_many(self._fitting()).run(entries, count)

    def _fitting(self) -> int:
        """How many there are cores for."""
        wanted = self.wanted()
        if not self._gives_way:
            return wanted
        if self._crowding is None or self._crowding.most != wanted:
            self._crowding = Crowding(wanted)
        return self._crowding.look(list if self._threads is None else self._threads.ids)

    def _as_many(self, count: int) -> Threads:
        if self._threads is None or self._threads.count != count:
            if self._threads is not None:
                self._threads.stop()
            self._threads = Threads(count)
        return self._threads


_team = Team()
use, wanted, give_way, crowded, run = _team.use, _team.wanted, _team.give_way, _team.crowded, _team.run
os.register_at_fork(after_in_child=_team.forget)
