"""The threads that run kernels, and who may use them (:mod:`foresay.verifier.ops.kernels.cpu.walk` is what they do).

How many threads run best depends on what else the machine does. A list is walked when its slowest thread has walked it,
so a thread that waits for a core holds up all others, and fewer threads are faster than some that wait. Linux counts
for every thread how long it could run and did not (run delay: proc(5), ``/proc/PID/task/TID/schedstat``); where it does
not say, all threads are always used. A row's bits do not depend on how many there are, so they may change between two
lists.

In a process that wants it (:func:`keep_apart`) threads that are as many as the cores have one each. Linux likes to wake
a thread up on the core of the one that wakes it: then two take turns on it, at every barrier, each after the other has
looked for long enough, and some passes take ten times as long.

::

    all ──a look finds cores missing──> so many fewer ──patience is over──> all, for a short look ──> ...
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from foresay.verifier.ops.kernels.cpu.walk import PLACES, walker

#: Seconds between looks while all threads run, and from when all are tried again until the look that follows.
_LOOK, _TRIAL = 0.25, 0.05
#: Seconds until all are tried again: at first, and at most, since each trial in vain doubles them.
_PATIENCE, _MOST_PATIENCE = 1.0, 16.0
#: A part of a core that may be missing before a thread less is used, and the least time that tells anything (seconds).
_SPARED, _LEAST = 0.3, 0.01

#: (thread ids) -> seconds they ran, and seconds they waited for a core, since they began.
Read = Callable[[Iterable[int]], tuple[float, float]]


def ran_and_waited(threads: Iterable[int]) -> tuple[float, float]:
    """Of these threads together, as Linux counts it; (0, 0) where nobody does."""
    ran = waited = 0
    for thread in threads:
        try:
            fields = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        except OSError:
            continue
        ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


class Crowding:
    """Says how many of ``most`` threads to use now. share: of the time in which threads could have run when all were
    tried last, the part they waited for a core."""

    def __init__(self, most: int, read: Read = ran_and_waited, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = self.count = most
        self.share = 0.0
        self._read, self._clock = read, clock
        self._patience = _PATIENCE
        self._due = clock() + _LOOK
        self._seen: tuple[float, float] | None = None

    def look(self, threads: Callable[[], Iterable[int]]) -> int:
        """To be asked before every list, by the thread that calls: how many threads walk it. threads: tells the ids of
        those that walked the one before."""
        now = self._clock()
        if self.count == self.most and self._seen is None:
            self._seen = self._read(threads())
        elif now >= self._due and self.count < self.most:
            self.count, self._seen, self._due = self.most, None, now + _TRIAL
        elif now >= self._due:
            self._judge(self._read(threads()), now)
        return self.count

    def _judge(self, seen: tuple[float, float], now: float) -> None:
        """After a while of all threads."""
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


#: More threads are never used, and kernels that need room for each have room for so many.
MOST = max(os.cpu_count() or 1, 4)


class Threads:
    """So many threads, the caller's among them. One list at a time: see :class:`Team`. state: where they wait for each
    other, int64[8 * places], if that is to be in some certain memory. cores: one for each thread, if they are to stay
    on them until they are stopped."""

    def __init__(self, count: int, state: np.ndarray | None = None, cores: Sequence[int] = ()) -> None:
        self.count = count
        self._state = np.empty(len(PLACES) * 8, dtype=np.int64) if state is None else state
        self._state[:] = 0
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
        if count:  # without a barrier behind an entry the others might still be looking for this list in the next
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
        self._cores: Sequence[int] = ()
        self.forget()

    def forget(self) -> None:
        """In a child: it has the caller's thread alone, and another may have held the lock."""
        self._lock = threading.Lock()
        self._threads: Threads | None = None
        self._crowding: Crowding | None = None
        self._state: np.ndarray | None = None

    def keep_apart(self) -> None:
        """Let threads have a core each where there are as many. For a process in which one thread calls and does little
        else: what that starts later has its core alone."""
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()

    def share(self) -> str:
        """Have the state of threads that are yet to be started in a file, which changes with every kernel that ends: so
        another process sees whether they get on. Returns its path."""
        file, size = os.memfd_create("threads"), len(PLACES) * 64
        os.ftruncate(file, size)
        self._state = np.frombuffer(mmap.mmap(file, size), dtype=np.int64)
        return f"/proc/{os.getpid()}/fd/{file}"

    def use(self, count: int) -> None:
        """Let kernels have so many threads, or fewer while there are no cores for so many."""
        self._asked = min(count, MOST)

    def wanted(self) -> int:
        """How many kernels have: as many as torch has, unless :meth:`use` said otherwise."""
        return self._asked or min(torch.get_num_threads(), MOST)

    def give_way(self, gives_way: bool) -> None:
        """Whether threads for which there is no core are left out (see
        :mod:`~foresay.verifier.ops.kernels.cpu.threads`)."""
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
            self._threads = Threads(count, self._state, self._cores if count == len(self._cores) else ())
        return self._threads


_team = Team()
use, wanted, give_way, crowded, run = _team.use, _team.wanted, _team.give_way, _team.crowded, _team.run
share, keep_apart = _team.share, _team.keep_apart
os.register_at_fork(after_in_child=_team.forget)
