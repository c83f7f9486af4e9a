"""A limit to how long other people's Python, such as a chat template, may run in a thread."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: How long nobody may hold the interpreter's lock: :func:`interrupted_after` says what happens then.
LOCKED_SECONDS = 15.0
#: How often that is looked at.
_LOOK_SECONDS = 1.0
_STDERR = 2  # the file, which is there whatever sys.stderr is


class TookTooLong(BaseException):
    """Raised inside of what runs when its time is over; no ``except Exception`` in there is to swallow it."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLong` in the block if it runs for longer, between two of its instructions.

    One instruction that does not end, such as a power of a power, holds the interpreter's lock, so that nobody could be
    served, nor stop the server: after ``LOCKED_SECONDS`` of that the process ends, and says where it was.
    """
    thread = threading.get_ident()
    _WATCH.begin(thread, seconds)
    try:
        yield
    finally:
        _WATCH.end(thread)


class _Watch(threading.Thread):
    """Looks after all such blocks of the process, one for each thread at most."""

    def __init__(self) -> None:
        super().__init__(name="watch over templates", daemon=True)
        self._deadlines: dict[int, float] = {}
        self._changed = threading.Condition()
        self._armed: float | None = None  # since when

    def begin(self, thread: int, seconds: float) -> None:
        now = time.monotonic()
        with self._changed:
            self._deadlines[thread] = now + seconds
            self._guard(now)  # by this thread: the watching one may not get its turn any more
            if not self.is_alive():
                self.start()
            self._changed.notify()

    def end(self, thread: int) -> None:
        with self._changed:
            self._deadlines.pop(thread, None)
            _interrupt(thread, None)  # one that came in the last moment

    def run(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(self._look(time.monotonic()))

    def _look(self, now: float) -> float | None:
        """Interrupt what is over its time; returns how long to sleep."""
        for thread in [one for one, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[thread]
            _interrupt(thread, TookTooLong)
        self._guard(now)
        if self._armed is None:
            return None
        return min((_LOOK_SECONDS, *(deadline - now for deadline in self._deadlines.values())))

    def _guard(self, now: float) -> None:
        """Have the process ended, by a thread that needs no lock, unless this is called again in time."""
        if self._armed is not None and now - self._armed < _LOOK_SECONDS:
            return  # setting it takes a tenth of a millisecond
        self._armed = now if self._deadlines else None
        if self._armed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(LOCKED_SECONDS, exit=True, file=_STDERR)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


_WATCH = _Watch()
