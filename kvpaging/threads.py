"""Threads that work in the background and hold nobody up, even if a file that they read never arrives.

Python waits at its end for the threads of concurrent.futures' ThreadPoolExecutor, however long they take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
#: For how many seconds each thread may finish what was submitted, once nothing more can be.
_FINISHING = 1.0


class BackgroundThreads:
    """``count`` threads that run jobs in the order in which they were submitted, until this object is dropped or Python
    ends. begun: called first in each of them."""

    def __init__(self, count: int, name: str, on_start: Callable[[], object]) -> None:
        self._jobs, self._threads = _Jobs(), list[Thread]()
        self._count, self._name, self._on_start = count, name, on_start
        self.replace()
        weakref.finalize(self, _end, self._jobs, self._threads)

    def replace(self) -> None:
        """Let other threads do what is to be done; those of now end as soon as they can."""
        given = (self._jobs, self._threads, self._on_start)
        self._threads[:] = (Thread(target=_work, args=given, name=self._name, daemon=True) for _ in range(self._count))
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in one of them; the future has what it returns or raises."""
        future = Future[T]()
        self._jobs.put((future, lambda: call(*args, **kwargs)))
        return future


def _work(jobs: _Jobs, threads: list[Thread], on_start: Callable[[], object]) -> None:
    on_start()
    while current_thread() in threads:
        if (job := jobs.get()) is None:
            jobs.put(None)  # for the next one: those that were replaced wait too
            return
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del job, future, call  # what they hold is not kept while waiting


def _end(jobs: _Jobs, threads: list[Thread]) -> None:
    jobs.put(None)
    for thread in threads:
        if thread is not current_thread():
            thread.join(_FINISHING)
