"""Compilation of LLVM IR, in a child process: LLVM ends the process in which it fails, and may take minutes for a
kernel that does not suit a processor. This file is the child's program too, and imports nothing else of ours.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm

#: Seconds of processor time for one kernel. The largest takes two.
SECONDS = 20
#: The child's name (`ps -o comm`).
NAME = "foresay-llvm"
#: Seconds without work after which the child ends: an engine compiles at its start, and seldom later.
_IDLE = 10.0


class Job(NamedTuple):
    """text: LLVM IR. triple, processor, features: the target, in LLVM's words."""

    text: str
    triple: str
    processor: str
    features: str


class CompilationFailed(Exception):
    """LLVM cannot compile a kernel for a processor. The message is LLVM's, if it has one."""


@cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def machine(triple: str, processor: str, features: str) -> Any:
    """LLVM's code generator."""
    _initialize()
    return llvm.Target.from_triple(triple).create_target_machine(processor, features, opt=3, jit=True)


def emitted(job: Job) -> bytes:
    """The machine code, as an object file, compiled in this process."""
    target, module = machine(*job[1:]), llvm.parse_assembly(job.text)
    module.verify()
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    code: bytes = target.emit_object(module)
    return code


class Compiler:
    """Owns the child, which is started when there is something to compile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def __call__(self, job: Job) -> bytes:
        """The machine code, as an object file. Raises CompilationFailed."""
        with self._lock:
            while True:
                try:
                    child = self._child or _Child()
                except OSError:  # no process can be started here
                    return emitted(job)
                answer = child.answer(job)
                self._child = child if answer else None
                code, fault = answer or (b"", child.fault())
                if fault:
                    raise CompilationFailed(fault)
                if code:
                    return code  # else it had ended for want of work

    def forget(self) -> None:
        """After a fork: the child is the parent's."""
        self.__init__()  # type: ignore[misc]


class _Child:
    """A process that runs this file."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(its.fileno()), str(SECONDS)],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for its parent
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    def answer(self, job: Job) -> tuple[bytes, str] | None:
        """The machine code, or why there is none; None if the child has ended."""
        try:
            self._connection.send(tuple(job))
            code, fault = self._connection.recv()
        except (EOFError, OSError):
            return None
        return code, fault

    def fault(self) -> str:
        """Why it has ended; "" if it had no work."""
        self._connection.close()
        words = self._process.communicate()[1].decode(errors="replace").strip()
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            return f"LLVM takes more than {SECONDS} s"
        if not status:
            return ""
        return words.splitlines()[-1] if words else f"LLVM ended with status {status}"


def _serve(connection: Connection, seconds: int) -> None:
    """Compile what comes, until nothing does. seconds: of processor time for each."""
    with suppress(OSError):  # a system without /proc
        Path("/proc/self/comm").write_text(NAME)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError):  # the parent has ended
        while connection.poll(_IDLE):
            job = Job(*connection.recv())
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, most))
            try:
                connection.send((emitted(job), ""))
            except RuntimeError as error:  # LLVM's words for a text or a target that it does not know
                connection.send((b"", str(error)))


compiled = Compiler()
os.register_at_fork(after_in_child=compiled.forget)

if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
