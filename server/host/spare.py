"""A spare engine process: it has imported the engine's modules, and waits to become the next engine.

Importing takes a second or two, a fork some milliseconds. So an engine process forks a copy of itself before it builds
anything::

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
import time
from pathlib import Path
from threading import Lock
from typing import Self

from foresay.server.host.child import Spawned, spawn, state_of

log = logging.getLogger("foresay.engine")

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
#: Process names of a spare and an engine (`ps -o comm`).
SPARE, ENGINE = b"foresay-spare", b"foresay-engine"


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
