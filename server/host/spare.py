"""A spare engine process: one that has imported what engines are made of, and waits to become the next one.

Importing takes a second or two, a fork some milliseconds. So an engine process leaves a copy of itself behind before it
builds anything::

    server ──exec──> engine 1 ──fork──> spare, which becomes engine 2 ──fork──> spare, ...

All of them are children of the server, which adopts what is orphaned and so sees how each ends; what they do not write
to is one memory. Where there is no spare (it was killed, it is not there yet, the first one must not be forked) the
next engine process is started as the first was.
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
#: What a spare is called among processes (`ps -o comm`), and an engine.
SPARE, ENGINE = b"foresay-spare", b"foresay-engine"


class Spares:
    """Starts engine processes, from spares where there is one. Called as :func:`~foresay.server.host.child.spawn` is.

    ahead: the first one is started before anybody has a word for it, so that it imports while the server does the same.
    """

    def __init__(self, ahead: bool = False) -> None:
        self._adopts = prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._control: socket.socket | None = None  # to the spare, and to those that come after it
        self._spare: Forked | None = None
        self._first: Spawned | None = None
        if ahead:
            with contextlib.suppress(OSError):  # then it will be tried again, and told
                self._first = self._started()

    def __call__(self) -> Spawned:
        """An engine process; whoever asks has to see to its end."""
        if self._first is not None:
            spawned, self._first = self._first, None
            return spawned
        return self._forked() or self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._first is not None:  # nobody asked
            self._first.connection.close()
            self._first.process.kill()
            self._first.process.wait()
        self._find()
        self._lose()

    def _started(self) -> Spawned:
        """One that is started as a program, which leaves a spare if there is none to come."""
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
        """What was the spare; None if there is none, or none that can do anything."""
        self._find()
        spare, self._spare = self._spare, None
        if spare is None or self._control is None:
            return None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        except OSError:  # it is gone
            ours.close()
            self._spare = spare
            self._lose()
            return None
        return Spawned(spare, ours)

    def _find(self) -> None:
        """Take note of a spare that has said that it is there, and of one that can do nothing any more."""
        if self._control is None:
            return
        with contextlib.suppress(BlockingIOError):
            told = self._control.recv(32)
            if not told:
                self._lose()
                return
            self._spare = Forked(int(told))
        if self._spare is not None and state_of(self._spare.pid) in "TtZX":
            self._lose()

    def _lose(self) -> None:
        """There is no spare any more."""
        if self._control is not None:
            self._control.close()
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
        self._control = self._spare = None


class Forked:
    """A child that we did not start but adopted. As far as we need it, like a :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None
        self._reaping = Lock()  # its id may be another's as soon as it is reaped

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        with self._reaping:
            if self._returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self._returncode = os.waitstatus_to_exitcode(status) if found else None
            return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it is over; :class:`subprocess.TimeoutExpired` after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """Kill it, if it lives."""
        with self._reaping:
            if self._returncode is None:
                os.kill(self.pid, signal.SIGKILL)


# -- in an engine process ---------------------------------------------------------------------------------------------


def leave_spare(control: socket.socket, server: int, given: int) -> int:
    """Leave a spare behind, before this process builds an engine and while nothing runs beside it.

    It returns in the process that called with what that was given, and in a spare, once the server asks for it and it
    has left one itself, with what it is given then: a descriptor. control: see :class:`Spares`; closed here. server:
    its process id. A spare ends when the server does, or closes the other end.
    """
    with control:
        while _can_be_forked() and _in_spare(server):
            os.close(given)
            control.send(str(os.getpid()).encode())
            told, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not told:
                os._exit(0)
            given = descriptors[0]
            prctl(PR_SET_NAME, ENGINE)
    return given


def _can_be_forked() -> bool:
    """A thread would be missing in the copy, with whatever it had locked; CUDA does not work in a copy once it was
    begun."""
    alone = len(os.listdir("/proc/self/task")) == 1
    return alone and "/libcuda.so" not in Path("/proc/self/maps").read_text()


def _in_spare(server: int) -> bool:
    """Fork a child of the server: one of a child of ours, which ends at once. True in it, False here."""
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
    """Be killed when the thread that started or adopted this process ends, even if this one is stopped; False: it is
    over already, or somebody else has adopted it.

    server: its process id.
    """
    if not prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        why = os.strerror(ctypes.get_errno())
        log.warning("prctl: %s; if the server is killed, an engine that hangs stays", why)
    return os.getppid() == server


def prctl(option: int, argument: int | bytes) -> bool:
    """Whether the kernel did it."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, argument) == 0)
