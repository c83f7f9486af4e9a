"""The engine process as the operating system sees it: how it is started, whether it computes or hangs, how it ends.

An engine process that hangs is told from one that works long. It shows life by frames (between two steps it answers a
Ping), by the CPU time it uses, and by kernels that end, where those are a CPU's. In a long step it shows the last two,
in an endless loop CPU time alone, deadlocked nothing. One that was stopped by a signal is not waited for. Time is what
the watchdog itself was awake for, so that a machine that was suspended, or a server that was stopped, is no reason to
kill anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import foresay

#: The looks that make up the timeout.
LOOKS = 30
#: Looks in a row at a process that is stopped.
STOPPED = 2
#: Times the timeout, for what may be slow by right: a prompt's chunk through a large model on two cores takes minutes,
#: and a loader waits for disks and networks.
PATIENCE = 20
#: Where it is seen that no kernel ends and no CPU time is used: a part of the timeout, but as long as this (seconds).
SOON, SOON_SECONDS = 6, 5.0


class Watchdog:
    """Asked every ``interval`` seconds. timeout: seconds that a ready engine may show no life at all."""

    def __init__(self, timeout: float) -> None:
        self.interval = timeout / LOOKS
        self._soon = max(LOOKS // SOON, min(LOOKS, round(SOON_SECONDS / self.interval)))
        self._ticks = self._idle = self._silent = self._stopped = self._still = 0
        self._progress: bytes | None = None

    def look(
        self, heard: bool, ticks: int, loading: bool, stopped: bool = False, progress: bytes | None = None
    ) -> str | None:
        """Why the engine is given up; None if it is not.

        heard: whether bytes came since the last look. ticks: CPU time it has used so far. loading: it answers nothing
        then, so that only one that stands still is given up. stopped: by a signal, just now. progress: other bytes than
        at the last look if a kernel has ended since; None if nobody knows.
        """
        self._stopped = self._stopped + 1 if stopped else 0
        self._silent = 0 if heard else self._silent + 1
        self._idle = 0 if heard or ticks != self._ticks else self._idle + 1
        self._still = 0 if heard or progress is None or progress != self._progress else self._still + 1
        self._ticks, self._progress = ticks, progress
        long = LOOKS * PATIENCE
        if self._stopped >= STOPPED:
            return f"the engine process hung (it was stopped by a signal {self._stopped * self.interval:g} s ago)"
        if self._still >= LOOKS:
            return f"the engine process hung (busy, but no kernel ended for {self._still * self.interval:g} s)"
        if self._idle >= (long if loading else LOOKS) or min(self._idle, self._still) >= self._soon:
            return f"the engine process hung (no sign of life for {self._idle * self.interval:g} s)"
        if self._silent >= long and not loading:
            return f"the engine process hung (busy, but no answer for {self._silent * self.interval:g} s)"
        return None


STOP_SECONDS = 5.0
#: Variables that are none of an engine's business.
SECRETS = frozenset({"FORESAY_API_KEY", "FORESAY_ADMIN_KEY"})
#: What goes on until an engine process has read its first frame.
STARTING = "starting the engine process"


#: Of OpenMP, which reads it as torch is imported.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


class Process(Protocol):
    """A child, as :class:`subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it is over; :class:`subprocess.TimeoutExpired` after so many seconds."""

    def kill(self) -> None:
        """Kill it, if it lives."""


class Spawned(NamedTuple):
    """An engine process that waits for its first frame, and the server's end of the socket pair."""

    process: Process
    connection: socket.socket


def spawn(control: socket.socket | None = None) -> Spawned:
    """Start the engine process on its end of a socket pair, running the same code as this one.

    It dies with the thread that calls this (see :func:`foresay.server.host.process.main`): the event loop's. control:
    where it leaves a spare; closed here.
    """
    ours, theirs = socket.socketpair()
    given = [theirs] if control is None else [theirs, control]
    descriptors = -1 if control is None else control.fileno(), theirs.fileno()
    try:
        return Spawned(started("foresay.server.host.process", given, *map(str, descriptors)), ours)
    except BaseException:
        ours.close()
        raise


def started(module: str, theirs: Sequence[socket.socket], *arguments: str) -> subprocess.Popen[bytes]:
    """Run a module in a process that is told our id and the arguments. theirs: what it has open; closed here."""
    root = str(Path(foresay.__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    with contextlib.ExitStack() as ends:
        for each in theirs:
            ends.enter_context(each)
        return subprocess.Popen(
            # -P: a server.py or torch.py where the user happens to be is none of ours.
            [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
            pass_fds=[each.fileno() for each in theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which drains first
            env=_environment() | {"PYTHONPATH": path},
        )


def _environment() -> dict[str, str]:
    """Of an engine. OpenBLAS's threads, which numpy would start at once, compute nothing there: torch's do, and those
    sleep while they wait for each other: beside other programs two thirds of a start went into spinning."""
    given = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {"OPENBLAS_NUM_THREADS": "1", **PASSIVE} | given


def cpu_ticks(process_id: int) -> int:
    """CPU time that all threads of a process have used, in the kernel's ticks (10 ms); 0 if it is gone."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def state_of(process_id: int) -> str:
    """A letter of the kernel's: T or t if somebody stopped the process (SIGSTOP, a debugger), Z or X if it is over."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def stopped(process_id: int, by: str = "Tt") -> bool:
    """Whether somebody stopped the process. by: T for a signal, t for a debugger."""
    return state_of(process_id) in by


def progress_in(file: str) -> bytes | None:
    """What an engine's threads have written there (:class:`~foresay.server.host.frames.Ready`); None if that is not to
    be read."""
    with contextlib.suppress(OSError):
        return Path(file).read_bytes() if file else None
    return None


def oom_kills() -> int | None:
    """Processes that this machine's kernel has killed for want of memory so far; None if it does not tell."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return None


def reap(process: Process) -> int:
    """Wait for the process; one that lingers without its socket is killed."""
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
