"""The threads that run kernels, and how many are used (:mod:`foresay.verifier.ops.kernels.cpu.walk` is what they
execute).

The best number of threads depends on the machine's other load. A list is finished when its slowest thread has finished,
so a thread that waits for a core delays all others, and fewer threads are faster than some that wait. Linux counts how
long every thread was runnable but did not run (run delay: proc(5), ``/proc/PID/task/TID/schedstat``); without this all
threads are always used. A row's bits do not depend on the number of threads, so it may change between two lists.

In a process that requests it (:func:`pin`) threads are pinned to one core each if there are as many cores. Linux
tends to wake a thread on the core of the one that wakes it: then the two alternate there at every barrier, each after
the other has finished spinning, and some passes take ten times as long.

::

    all ──a check finds cores missing──> that many fewer ──after some time──> all, for a short trial ──> ...
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from foresay.verifier.ops.kernels.cpu.walk import PLACES, walker

#: Seconds between checks while all threads run, and from a new trial of all until the next check.
_LOOK, _TRIAL = 0.25, 0.05
#: Seconds until all are tried again: at first, and at most, since each failed trial doubles them.
_PATIENCE, _MOST_PATIENCE = 1.0, 16.0
#: The part of a core that may be missing before one thread fewer is used, and the least useful measurement (seconds).
_SPARED, _LEAST = 0.3, 0.01

#: (thread ids) -> seconds they ran, and seconds they waited for a core, since they started.
Read = Callable[[Iterable[int]], tuple[float, float]]


def read_schedstat(threads: Iterable[int]) -> tuple[float, float]:
    """The totals of these threads from Linux; (0, 0) if not available."""
    ran = waited = 0
    for thread in threads:
        try:
            fields = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        except OSError:
            continue
        ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


class ThreadTuner:
    """Decides how many of ``most`` threads to use now. share: the share of runnable time that threads waited for a core
    when all were tried last."""

    def __init__(self, most: int, read: Read = read_schedstat, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = self.count = most
        self.share = 0.0
        self._read, self._clock = read, clock
        self._patience = _PATIENCE
        self._due = clock() + _LOOK
        self._seen: tuple[float, float] | None = None

    def update(self, threads: Callable[[], Iterable[int]]) -> int:
        """Called before every list, by the calling thread: how many threads to use. threads: returns the ids of those
        used for the last one."""
        now = self._clock()
        if self.count == self.most and self._seen is None:
            self._seen = self._read(threads())
        elif now >= self._due and self.count < self.most:
            self.count, self._seen, self._due = self.most, None, now + _TRIAL
        elif now >= self._due:
            self._judge(self._read(threads()), now)
        return self.count

    def _judge(self, seen: tuple[float, float], now: float) -> None:
        """Evaluate a period with all threads."""
        ran, waited = (later - before for later, before in zip(seen, self._seen or seen, strict=True))
        self._seen, self._due = seen, now + _LOOK
        if ran + waited < _LEAST:
            return
        self.share = waited / (ran + waited)
        missing = self.share * self.most
        if missing > _SPARED and self.most > 1:
            self.count = max(1, self.most - max(1, round(missing)))
            self._due, self._patience = now + self._patience, min(2 * self._patience, _MOST_PATIENCE)
        else:
            self._patience = _PATIENCE


#: The most threads; kernels that need memory for each thread have it for this many.
MOST = max(os.cpu_count() or 1, 4)


class Threads:
    """A fixed number of threads, including the caller's. One list at a time: see :class:`ThreadPool`. cores: one for
    each thread, if they are pinned until they are stopped."""

    def __init__(self, count: int, cores: Sequence[int] = ()) -> None:
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
        self._cores = cores
        for id, core in zip(self.ids(), cores, strict=False):
            os.sched_setaffinity(id, (core,))

    def ids(self) -> list[int]:
        """The kernel's numbers of the threads, the caller's first."""
        return [threading.get_native_id(), *(thread.native_id or 0 for thread in self._others)]

    def run(self, entries: int, count: int) -> None:
        """Walk ``count`` pairs of int64 at this address: of a kernel, and of its arguments."""
        if count:  # without a barrier after an entry the others might still be looking for this list in the next
            self._walker.run(self._at, entries, count)

    def stop(self) -> None:
        """End the threads; nothing can be run any more."""
        self._state[PLACES["stop"] // 8] = 1
        self._walker.run(self._at, 0, 0)
        for thread in self._others:
            thread.join()
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def _serve(state: np.ndarray, number: int) -> None:
    """The loop of each other thread. It holds a reference to the memory that it waits on, so that it is not freed."""
    walker().serve(state.ctypes.data, number)


class ThreadPool:
    """The threads of this process: started when they are first needed, and replaced when another number is requested,
    or fits the free cores better.

    Callers in several threads wait for each other.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._gives_way = True
        self._cores: Sequence[int] = ()
        self.forget()

    def forget(self) -> None:
        """In a forked child: only the calling thread exists, and another may have held the lock."""
        self._lock = threading.Lock()
        self._threads: Threads | None = None
        self._crowding: ThreadTuner | None = None

    def pin(self) -> None:
        """Pin each thread to a core if there are enough. For a process in which one thread calls and does little else:
        threads that it starts later only have its core."""
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()

    def set_num_threads(self, count: int) -> None:
        """Use this many threads for kernels, or fewer while there are not enough cores."""
        self._asked = min(count, MOST)

    def num_threads(self) -> int:
        """How many threads kernels get: as many as torch has, unless :meth:`set_num_threads` set another number."""
        return self._asked or min(torch.get_num_threads(), MOST)

    def set_yielding(self, gives_way: bool) -> None:
        """Set whether threads without a free core are left out (see
        :mod:`~foresay.verifier.ops.kernels.cpu.threads`)."""
        with self._lock:
            self._gives_way, self._crowding = gives_way, None

    def cpu_wait(self) -> float:
        """The share of their recent runnable time that the threads waited for a core."""
        crowding = self._crowding
        return 0.0 if crowding is None else crowding.share

    def run(self, entries: int, count: int) -> None:
        """Walk ``count`` pairs of int64 at this address: of a kernel, and of its arguments."""
        with self._lock:
            self._as_many(self._fitting()).run(entries, count)

    def _fitting(self) -> int:
        """How many threads there are cores for."""
        wanted = self.num_threads()
        if not self._gives_way:
            return wanted
        if self._crowding is None or self._crowding.most != wanted:
            self._crowding = ThreadTuner(wanted)
        return self._crowding.update(list if self._threads is None else self._threads.ids)

    def _as_many(self, count: int) -> Threads:
        if self._threads is None or self._threads.count != count:
            if self._threads is not None:
                self._threads.stop()
            self._threads = Threads(count, self._cores if count == len(self._cores) else ())
        return self._threads


_team = ThreadPool()
set_num_threads, num_threads, cpu_wait, run = _team.set_num_threads, _team.num_threads, _team.cpu_wait, _team.run
pin, set_yielding = _team.pin, _team.set_yielding
os.register_at_fork(after_in_child=_team.forget)
