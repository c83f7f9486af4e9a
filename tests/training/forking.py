"""Processes that are born with everything imported: what is killed or stopped again and again need not pay for that.

They are forked from a server process that imported this module, which has no other threads.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foresay.drafters.training import run
from foresay.drafters.training.run import Run
from foresay.drafters.training.settings import Settings
from foresay.drafters.training.teacher import Teacher
from foresay.drafters.training.work import Work
from foresay.server.cli.main import main

SECONDS = 120.0

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "foresay.server.engine.build", "transformers.models.llama.modeling_llama"])


@dataclass(frozen=True)
class Ended:
    """A command that has ended. status: its exit status; out, err: what it printed."""

    status: int
    out: str
    err: str


def foresay(words: list[str], largest_file: int = resource.RLIM_INFINITY) -> Ended:
    """Run a command to its end, in a process that can make no file larger than so many bytes."""
    with TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        status = exit_status(_command, words, largest_file, out, err)
        return Ended(status, out.read_text(), err.read_text())


def exit_status(target: Callable[..., object], *arguments: Any) -> int:
    """Call ``target`` in a process of its own; minus the signal if that was killed."""
    process = _FORKS.Process(target=target, args=arguments)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{target.__name__}{arguments} did not end in {SECONDS:.0f} seconds")
    return process.exitcode


def _command(words: list[str], largest_file: int, out: Path, err: Path) -> None:
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    torch.set_num_threads(1)
    sys.exit(main(words))


def attempt(settings: Settings, out: Path, dies_at: int) -> None:
    """A training run that is killed right before it puts its ``dies_at``-th file in its place (0: never).

    The file it has written is cut in half. State is saved after every step.
    """
    replace, seen = os.replace, 0

    def deadly(source: Path, place: Path) -> None:
        nonlocal seen
        seen += 1
        if seen == dies_at:
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, place)

    torch.set_num_threads(1)
    os.replace = deadly  # type: ignore[assignment]
    run._SAVED_EVERY = -1.0
    teacher = Teacher(Path(settings.target), "cpu", torch.float32)
    Run(settings, teacher, Work(out, settings), progress=False)()
