"""The engine process at the level of the operating system: how it starts, whether it computes or hangs, how it ends.

The watchdog distinguishes a hung engine from a slow one. Signs of life are frames (between steps it answers a Ping),
CPU time used, and, for CPU kernels, kernels that end. A long step shows the last two, an endless loop only CPU time,
a deadlock nothing. A process stopped by a signal is given up at once. Only time in which the watchdog itself ran
counts, so that nothing is killed because the machine was suspended or the server stopped.

A spare has imported the engine's modules, and waits to become the next engine: importing takes a second or two, a fork
some milliseconds. So an engine process forks a copy of itself before it builds anything::

    server ──exec──> engine 1 ──fork──> spare, which becomes engine 2 ──fork──> spare, ...

All are children of the server, which adopts orphans and so sees how each ends; memory that they do not write to is
shared. Without a spare (it was killed, is not there yet, or the first one could not be forked) the next engine process
is started like the first.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

import foresay

#: Looks per timeout.
LOOKS = 30
#: Consecutive looks at a stopped process before it counts as hung.
STOPPED = 2
#: Multiples of the timeout for what may legitimately be slow: a prefill chunk of a large model on two cores takes
#: minutes, and loading waits for disks and networks.
SLOW_FACTOR = 20
#: If no kernel ends and no CPU time is used: this fraction of the timeout, but at least this long (seconds).
SOON, SOON_SECONDS = 6, 5.0


class Watchdog:
    """To be called every ``interval`` seconds. timeout: seconds for which a ready engine may show no sign of life."""

    def __init__(self, timeout: float) -> None:
        self.interval = timeout / LOOKS
        self._soon = max(LOOKS // SOON, min(LOOKS, round(SOON_SECONDS / self.interval)))
        self._ticks = self._idle = self._silent = self._stopped = self._still = 0
        self._progress: bytes | None = None

    def look(
        self, received: bool, ticks: int, loading: bool, stopped: bool = False, progress: bytes | None = None
    ) -> str | None:
        """Why the engine counts as hung; None if it does not.

        received: whether bytes arrived since the last look. ticks: CPU time used so far. loading: it answers no pings
        then, so only an idle process counts as hung. stopped: by a signal, just now. progress: bytes that differ from
        the last look's if a kernel has ended since; None if unknown.
        """
        self._stopped = self._stopped + 1 if stopped else 0
        self._silent = 0 if received else self._silent + 1
        self._idle = 0 if received or ticks != self._ticks else self._idle + 1
        self._still = 0 if received or progress is None or progress != self._progress else self._still + 1
        self._ticks, self._progress = ticks, progress
        long = LOOKS * SLOW_FACTOR
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
#: Environment variables that an engine does not get.
SECRETS = frozenset({"FORESAY_API_KEY", "FORESAY_ADMIN_KEY"})
#: The phase until an engine process has read its first frame.
STARTING = "starting the engine process"


#: For OpenMP, which reads it when torch is imported.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


class Spawned(NamedTuple):
    """An engine process that waits for its first frame, and the server's end of the socket pair."""

    process: Process
    connection: socket.socket


def spawn(control: socket.socket | None = None) -> Spawned:
    """Start the engine process on its end of a socket pair, running the same code as this one.

    It dies with the calling thread, which is the event loop's (see :func:`foresay.server.host.process.main`). control:
    socket on which it hands over a spare process; closed here.
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
    """Run a module in a process whose arguments are our process id and ``arguments``. theirs: sockets that it inherits;
    closed here."""
    root = str(Path(foresay.__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    with contextlib.ExitStack() as ends:
        for each in theirs:
            ends.enter_context(each)
        return subprocess.Popen(
            # -P: do not import a server.py or torch.py from the user's working directory.
            [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
            pass_fds=[each.fileno() for each in theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the server, which drains first
            env=_environment() | {"PYTHONPATH": path},
        )


def _environment() -> dict[str, str]:
    """An engine's environment. OpenBLAS threads, which numpy would start at once, compute nothing there; torch's do,
    and they sleep while waiting for each other: with other programs running, two thirds of a start went into
    spinning."""
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
    """The kernel's state letter: T or t if the process is stopped (SIGSTOP, a debugger), Z or X if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def stopped(process_id: int, by: str = "Tt") -> bool:
    """Whether the process is stopped. by: T for a signal, t for a debugger."""
    return state_of(process_id) in by


def progress_in(file: str) -> bytes | None:
    """What an engine's threads have written to this file (:class:`~foresay.server.host.frames.Ready`); None if
    unreadable."""
    with contextlib.suppress(OSError):
        return Path(file).read_bytes() if file else None
    return None


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory so far; None if it does not report that."""
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


log = logging.getLogger("foresay.engine")

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
#: Process names of a spare, an engine, and the compiler of an engine's kernels (`ps -o comm`).
SPARE, ENGINE, COMPILER = b"foresay-spare", b"foresay-engine", b"foresay-llvm"


class Spares:
    """Starts engine processes, from a spare if there is one. Called like :func:`~foresay.server.host.child.spawn`.

    ahead: start the first one before it is requested, so that it imports while the server does.
    """

    def __init__(self, ahead: bool = False) -> None:
        self._adopts = prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._control: socket.socket | None = None  # to the spare, and to its successors
        self._spare: Forked | None = None
        self._first: Spawned | None = None
        if ahead:
            with contextlib.suppress(OSError):  # the first call tries again, and raises
                self._first = self._started()

    def __call__(self) -> Spawned:
        """An engine process; the caller must end it."""
        if self._first is not None:
            spawned, self._first = self._first, None
            return spawned
        return self._forked() or self._started()

    def __enter__(self) -> Self:
        if self._adopts:
            signal.signal(signal.SIGCHLD, _reap_compilers)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._first is not None:  # never requested
            self._first.connection.close()
            self._first.process.kill()
            self._first.process.wait()
        self._find()
        self._lose()

    def _started(self) -> Spawned:
        """Start one as a program, which forks a spare unless one is expected."""
        if self._control is not None or not self._adopts:
            return spawn()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as ends, theirs:
            ends.enter_context(control)
            spawned = spawn(theirs)
            ends.pop_all()
        control.setblocking(False)
        self._control = control
        return spawned

    def _forked(self) -> Spawned | None:
        """The spare as an engine process; None if there is none, or it is not usable."""
        self._find()
        spare, self._spare = self._spare, None
        if spare is None or self._control is None:
            return None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        except OSError:  # the spare is gone
            ours.close()
            self._spare = spare
            self._lose()
            return None
        return Spawned(spare, ours)

    def _find(self) -> None:
        """Register a spare that has announced itself, and drop one that no longer works."""
        if self._control is None:
            return
        with contextlib.suppress(BlockingIOError):
            received = self._control.recv(32)
            if not received:
                self._lose()
                return
            self._spare = Forked(int(received))
        if self._spare is not None and state_of(self._spare.pid) in "TtZX":
            self._lose()

    def _lose(self) -> None:
        """Drop the spare."""
        if self._control is not None:
            self._control.close()
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
        self._control = self._spare = None


class Forked:
    """A child that we adopted rather than started; the part of :class:`subprocess.Popen` that we need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None
        self._reaping = Lock()  # its id may be reused as soon as it is reaped

    def poll(self) -> int | None:
        with self._reaping:
            if self._returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self._returncode = os.waitstatus_to_exitcode(status) if found else None
            return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        with self._reaping:
            if self._returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def _reap_compilers(*_: object) -> None:
    """An engine that is killed leaves its compiler to the server, which adopts it. It ends at once."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_bytes().strip() == COMPILER:
                    os.waitpid(pid, os.WNOHANG)


#: A child process.
Process = subprocess.Popen[bytes] | Forked

# -- in an engine process ---------------------------------------------------------------------------------------------


def leave_spare(control: socket.socket, server: int, given: int) -> int:
    """Fork a spare, before this process builds an engine and while it has a single thread.

    Returns ``given`` in the calling process; in a spare, once the server needs it and it has forked another, the
    descriptor it then receives. control: see :class:`Spares`; closed here. server: its process id. A spare ends when
    the server does, or when it closes the other end.
    """
    with control:
        while _can_be_forked() and _in_spare(server):
            os.close(given)
            control.send(str(os.getpid()).encode())
            received, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not received:
                os._exit(0)
            given = descriptors[0]
            prctl(PR_SET_NAME, ENGINE)
    return given


def _can_be_forked() -> bool:
    """Other threads would be missing in the copy while their locks stay held; CUDA, once initialised, does not work in
    a copy."""
    alone = len(os.listdir("/proc/self/task")) == 1
    return alone and "/libcuda.so" not in Path("/proc/self/maps").read_text()


def _in_spare(server: int) -> bool:
    """Fork a child of the server, by way of a child that exits at once. True in it, False here."""
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    prctl(PR_SET_NAME, SPARE)
    us = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == us:
        time.sleep(0.001)
    if not die_with(server):
        os._exit(0)
    return True


def die_with(server: int) -> bool:
    """Have the kernel kill this process when the thread that started or adopted it ends, even while stopped; False if
    that has ended already, or another process has adopted it.

    server: its process id.
    """
    if not prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        why = os.strerror(ctypes.get_errno())
        log.warning("prctl: %s; if the server is killed, an engine that hangs stays", why)
    return os.getppid() == server


def prctl(option: int, argument: int | bytes) -> bool:
    """Call prctl; whether it succeeded."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, argument) == 0)
