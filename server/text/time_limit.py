"""A limit to how long a block of code may compute, such as the chat template of somebody else's checkpoint.

Time is the processor time of the block's own thread: none passes while the process is stopped, or while the thread
waits for a processor or for the interpreter's lock.

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
from contextlib import contextmanager
from functools import cache

#: How long the interpreter's lock may be held once the time is over: :func:`interrupted_after` says what happens then.
LOCKED_SECONDS = 5.0
#: Between two looks at a block whose time is nearly over.
_SHORTEST_LOOK = 0.01
_STDERR = 2  # the file, which is there whatever sys.stderr is


class TimeIsUp(BaseException):
    """Raised inside of what runs when its time is over; no ``except Exception`` in there is to swallow it."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeIsUp` in the block if it computes for longer, between two of its instructions.

    One instruction that does not end, such as a power of a power, holds the interpreter's lock, so that nobody could be
    served, nor stop the server: after ``LOCKED_SECONDS`` more the process ends by SIGVTALRM, and says where it was.
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
        guard.close()  # whatever else happens: a guard that is left ends the process


class _Watch(threading.Thread):
    """Looks after all such blocks of the process, one for each thread at most. until: by thread, its clock, and what
    that may show."""

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
            self._until.pop(thread, None)
            _interrupt(thread, None)  # one that came in the last moment

    def run(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(self._look())

    def _look(self) -> float | None:
        """Interrupt what is over its time; returns how long to sleep, since no other can be over sooner."""
        left = {thread: until - time.clock_gettime(clock) for thread, (clock, until) in self._until.items()}
        for thread in [thread for thread, seconds in left.items() if seconds <= 0]:
            del self._until[thread], left[thread]
            _interrupt(thread, TimeIsUp)
        return max(_SHORTEST_LOOK, min(left.values())) if left else None


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


_WATCH = _Watch()


# -- where no thread of Python's can do anything -----------------------------------------------------------------------


class _Event(ctypes.Structure):
    """``struct sigevent``. notify: 0 is by a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: between two signals (0: there is one), and until the first."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again", "again_ns", "seconds", "nanoseconds"))


class _Guard:
    """Has the kernel end the process when a clock has gone on for so long, unless this is closed before."""

    def __init__(self, clock: int, seconds: float) -> None:
        self._timer = ctypes.c_void_p()
        event, times = _Event(signal=signal.SIGVTALRM), _Times(seconds=int(seconds), nanoseconds=int(seconds % 1 * 1e9))
        self._set = _timers().timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)) == 0
        if self._set:  # a sandbox may have no such timers
            _timers().timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        if self._set:
            _timers().timer_delete(self._timer)


@cache
def _timers() -> ctypes.CDLL:
    """The library that has the timers (before glibc 2.34 librt); from now on their signal shows where all threads are
    before it ends the process, which takes no lock."""
    faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=True, chain=True)
    library = ctypes.CDLL(None)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1")
