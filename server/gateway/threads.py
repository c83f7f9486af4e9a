"""The threads beside the event loop, shared by key: whoever sends much to read waits for itself alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

from server.gateway.caller import CALLER, Caller
from server.gateway.share import Shared

P = ParamSpec("P")
T = TypeVar("T")


class _Job(NamedTuple):
    caller: Caller
    work: Callable[[], Any]
    done: Future[Any]


class SharedThreads(ThreadPoolExecutor):
    """A pool whose threads callers hold as :class:`~server.gateway.share.Shared` says, each with a queue of its own.

    Callers take turns where several wait. What the server does for itself counts as one caller more.
    """

    def __init__(self, most: int | None = None, thread_name_prefix: str = "") -> None:
        super().__init__(most, thread_name_prefix)
        self._places = Shared(self._max_workers)
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, in the order of their turns
        self._shut = False
        self._lock = Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` as soon as its caller, that of the running context, may hold a thread; RuntimeError behind a
        :meth:`shutdown`."""
        job = _Job(CALLER.get(), partial(fn, *args, **kwargs), Future())
        with self._lock:
            if self._shut:
                raise RuntimeError("this pool of threads is shut down")
            self._waiting.setdefault(job.caller.tenant, deque()).append(job)
            self._begin()
        return job.done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As any pool, but what waits for a thread is cancelled in any case."""
        with self._lock:
            waiting, self._waiting, self._shut = self._waiting, {}, True
        for jobs in waiting.values():
            for job in jobs:
                job.done.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _begin(self) -> None:
        """Start whatever may be started."""
        while (job := self._next()) is not None:
            self._places.change(job.caller.tenant, 1)
            super().submit(self._run, job)

    def _next(self) -> _Job | None:
        """Takes the job of the next caller who may hold a thread; None if all have to wait."""
        fitting = (tenant for tenant, jobs in self._waiting.items() if self._places.fits(1, jobs[0].caller))
        tenant = next(fitting, None)
        if tenant is None:
            return None
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind all others
        return job

    def _run(self, job: _Job) -> None:
        try:
            if job.done.set_running_or_notify_cancel():
                _settle(job)
        finally:
            with self._lock:
                self._places.change(job.caller.tenant, -1)
                self._begin()


def _settle(job: _Job) -> None:
    try:
        result = job.work()
    except BaseException as error:
        job.done.set_exception(error)
    else:
        job.done.set_result(result)
