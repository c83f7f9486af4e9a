"""Steps that go wrong, for the calls of ``bench.gpu``: each is run by a worker, as a step of its own."""

from __future__ import annotations

import os
import signal
import time

from bench.gpu.worker import Task


def sound(task: Task) -> None:
    """Says which process it is in."""
    task.take("process", "", os.getpid)


def raises(task: Task) -> None:
    """One measurement fails, the next one is made."""
    task.take("bad", "s", lambda: [][1])
    task.take("good", "s", lambda: 1.0)


def broken_context(task: Task) -> None:
    """As a kernel of Triton's fails on a GPU that answers no more."""

    def launch() -> float:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    task.take("launched", "s", launch)
    task.take("never", "s", lambda: 1.0)


def broken_driver(task: Task) -> None:
    """The error says nothing of CUDA, but giving memory back does not work any more."""
    task.device = NotAnswering()
    task.take("launched", "s", lambda: [][1])


class NotAnswering:
    """A device that was left by its driver."""

    cuda = True

    def free(self) -> None:
        raise RuntimeError("cuda: unknown error")


def hangs(task: Task) -> None:
    """Never ends."""
    task.lines.write(task.name, "begun", os.getpid())
    time.sleep(3600)


def dies(task: Task) -> None:
    """As a process that the system ends."""
    task.lines.write(task.name, "begun", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def fails_to_compile(task: Task) -> None:
    """As a compiler that finds a mistake."""
    raise ValueError("PTX was refused")


def tests_pass(task: Task) -> None:
    """The number of tests that passed, as a measurement."""
    task.take("kernel tests", "passed", lambda: 27)
