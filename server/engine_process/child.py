"""The engine process at the level of the operating system: how it starts and imports, whether it computes or hangs, how
it ends.

The watchdog distinguishes a hung engine from a slow one. Signs of life are frames (between steps it answers a Ping)
and CPU time used: a long step shows the second, a deadlock neither. A process stopped by a signal is given up at once.
Only time in which the watchdog itself ran counts, so that nothing is killed because the machine was suspended or the
server stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import foresay

#: Looks per timeout.
LOOKS = 30
#: Consecutive looks at a stopped process before it counts as hung.
STOPPED = 2
#: Multiples of the timeout for what may legitimately be slow: a prefill chunk of a large model on two cores takes
#: minutes, and loading waits for disks and networks.
SLOW_FACTOR = 20


class Watchdog:
    """To be called every ``interval`` seconds. timeout: seconds for which a ready engine may show no sign of life."""

    def __init__(self, timeout: float) -> None:
        self.interval = timeout / LOOKS
        self._ticks = self._idle = self._silent = self._stopped = 0

    def look(self, received: bool, ticks: int, loading: bool, stopped: bool = False) -> str | None:
        """Why the engine counts as hung; None if it does not.

        received: whether bytes arrived since the last look. ticks: CPU time used so far. loading: it answers no pings
        then, so only an idle process counts as hung. stopped: by a signal, just now.
        """
        self._stopped = self._stopped + 1 if stopped else 0
        self._silent = 0 if received else self._silent + 1
        self._idle = 0 if received or ticks != self._ticks else self._idle + 1
        self._ticks = ticks
        long = LOOKS * SLOW_FACTOR
        if self._stopped >= STOPPED:
            return f"the engine process hung (it was stopped by a signal {self._stopped * self.interval:g} s ago)"
        if self._idle >= (long if loading else LOOKS):
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


#: A child process.
Process = subprocess.Popen[bytes]


class Spawned(NamedTuple):
    """An engine process that waits for its first frame, and the server's end of the socket pair."""

    process: Process
    connection: socket.socket

    def discard(self) -> None:
        """End one that nobody needs."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn() -> Spawned:
    """Start the engine process on its end of a socket pair, running the same code as this one.

    It dies with the calling thread, which is the event loop's (see :func:`foresay.server.engine_process.process.main`).
    """
    ours, theirs = socket.socketpair()
    try:
        return Spawned(started("foresay.server.engine_process.process", theirs), ours)
    except BaseException:
        ours.close()
        raise


def has_imported(process: Process) -> bool:
    """Whether an engine process has imported its modules, or has ended."""
    name = Path(f"/proc/{process.pid}/comm")
    return process.poll() is not None or name.read_bytes().strip() == ENGINE


@contextlib.contextmanager
def ahead(wanted: bool) -> Iterator[Callable[[], Spawned]]:
    """What starts engine processes. If ``wanted``, the first is started now, so that it imports while the server
    does; it is ended if nobody requests it."""
    first: list[Spawned] = []
    if wanted:
        with contextlib.suppress(OSError):  # the first call tries again, and raises
            first.append(spawn())
    try:
        yield lambda: first.pop() if first else spawn()
    finally:
        for spawned in first:
            spawned.discard()


def started(module: str, theirs: socket.socket, *arguments: str) -> Process:
    """Run a module in a process whose arguments are our process id, the descriptor of ``theirs``, which it inherits and
    which is closed here, and ``arguments``."""
    root = str(Path(foresay.__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    with theirs:
        return subprocess.Popen(
            # -P: do not import a server.py or torch.py from the user's working directory.
            [sys.executable, "-P", "-m", module, str(os.getpid()), str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
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


def stopped(process_id: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger."""
    return state_of(process_id) in "Tt"


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

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
#: Process name of an engine that has imported its modules (`ps -o comm`).
ENGINE = b"foresay-engine"

# -- in an engine process ---------------------------------------------------------------------------------------------


def die_with(server: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends, even while stopped; False if that has
    ended already.

    server: its process id.
    """
    if not prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        why = os.strerror(ctypes.get_errno())
        log.warning("prctl: %s; if the server is killed, an engine that hangs stays", why)
    return os.getppid() == server


def prctl(option: int, argument: int | bytes) -> bool:
    """Call prctl; whether it succeeded."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, argument) == 0)


# -- importing ---------------------------------------------------------------------------------------------------------


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the block. Imported modules stay, yet each full collection traverses them: 0.2 s
    for torch.

    Our own processes freeze them afterwards (:func:`gc.freeze`); a user's process is left alone.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: Held while torch is hidden, and during the first import of torch in a process that may hide it.
importing = Lock()
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_tokenizers(name: str = "PreTrainedTokenizerFast") -> None:
    """Import the tokenizer class of this name from transformers. If torch is not imported yet, transformers considers
    it missing from then on: only for processes that never run one of its models."""
    with importing:
        if "torch" not in sys.modules:
            with _hidden(), uncollected():
                import transformers

                getattr(transformers, name)


@contextmanager
def _hidden() -> Iterator[None]:
    """Hide torch from imports in the block, without transformers' warning."""
    previous = os.environ.get(_QUIET)
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if previous is not None:
            os.environ[_QUIET] = previous
