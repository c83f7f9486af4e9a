"""A limit on the CPU time of a block of code, such as the chat template of an untrusted checkpoint.

Time is the CPU time of the block's own thread: none passes while the process is stopped, or while the thread waits for
a core or for the interpreter's lock.

::

    begin ──its seconds──> TookTooLong, between two of its instructions ──LOCKED_SECONDS──> the process ends
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

#: How long the interpreter's lock may be held after the limit: see :func:`interrupted_after`.
LOCKED_SECONDS = 5.0
#: Shortest time between two checks of a block near its limit.
_SHORTEST_LOOK = 0.01
_STDERR = 2  # the descriptor, whatever sys.stderr is


class TimeIsUp(BaseException):
    """Raised inside a block at its limit; a BaseException, so that no ``except Exception`` in there swallows it."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeIsUp` in the block, between two of its instructions, if it computes for longer.

    A single endless instruction, such as a power of a power, holds the interpreter's lock, so that the server could
    neither serve nor stop: after ``LOCKED_SECONDS`` more the process ends by SIGVTALRM, printing where it was.
    """
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    guard = _Guard(clock, seconds + LOCKED_SECONDS)
    try:
        _WATCH.begin(thread, clock, seconds)
        try:
            yield
        finally:
            _WATCH.end(thread)
    finally:
        guard.close()  # in any case: a remaining guard ends the process


class _Watch(threading.Thread):
    """Watches all such blocks of the process, at most one per thread. until: by thread, its clock, and its limit on
    that clock."""

    def __init__(self) -> None:
        super().__init__(name="watch over templates", daemon=True)
        self._until: dict[int, tuple[int, float]] = {}
        self._changed = threading.Condition()

    def begin(self, thread: int, clock: int, seconds: float) -> None:
        with self._changed:
            self._until[thread] = clock, time.clock_gettime(clock) + seconds
            if not self.is_alive():
                self.start()
            self._changed.notify()

    def end(self, thread: int) -> None:
        with self._changed:
            if self._until.pop(thread, None) is None:
                with suppress(TimeIsUp):  # one that came at the last moment
                    _arrive()

    def run(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(self._look())

    def _look(self) -> float | None:
        """Interrupt blocks over their limit; returns how long to sleep until the next could be."""
        left = {thread: until - time.clock_gettime(clock) for thread, (clock, until) in self._until.items()}
        for thread in [thread for thread, seconds in left.items() if seconds <= 0]:
            del self._until[thread], left[thread]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))
        return max(_SHORTEST_LOOK, min(left.values())) if left else None


def _arrive() -> None:
    """An interruption of this thread arrives here, as wherever a function begins. To take it back would leave it
    announced, and Python 3.11 then begins functions without end while it is profiled."""


_WATCH = _Watch()


# -- when no Python thread can act -----------------------------------------------------------------------


class _Event(ctypes.Structure):
    """``struct sigevent``. notify: 0 is by a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: between two signals (0: only one), and until the first."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again", "again_ns", "seconds", "nanoseconds"))


class _Guard:
    """Lets the kernel end the process after ``seconds`` on a clock, unless it is closed before."""

    def __init__(self, clock: int, seconds: float) -> None:
        self._timer = ctypes.c_void_p()
        event, times = _Event(signal=signal.SIGVTALRM), _Times(seconds=int(seconds), nanoseconds=int(seconds % 1 * 1e9))
        self._set = _timers().timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)) == 0
        if self._set:  # a sandbox may lack such timers
            _timers().timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        if self._set:
            _timers().timer_delete(self._timer)


@cache
def _timers() -> ctypes.CDLL:
    """The library with the timers (librt before glibc 2.34). From now on their signal prints all threads' stacks,
    without taking a lock, before it ends the process."""
    faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=True, chain=True)
    library = ctypes.CDLL(None)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1")
