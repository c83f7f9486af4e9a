"""``python -m tests.training.dying KIND TARGET PROMPTS DIR``: a run that the system kills again and again.

Attempt *k* is killed right before it puts its *k*-th file in its place, the file it has written cut in half. Then
another attempt goes on, until one ends. DIR/whole is the same run undisturbed. Prints how often it was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from server.training import run
from server.training.run import Run
from server.training.settings import Settings
from server.training.teacher import Teacher
from server.training.work import Work


def attempt(settings: Settings, teacher: Teacher, out: Path, dies_at: int) -> int:
    """Fork a process that is killed at its ``dies_at``-th file (0: never); returns what it ended with."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        replace, seen = os.replace, 0

        def deadly(source, place) -> None:
            nonlocal seen
            seen += 1
            if seen == dies_at:
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, place)

        os.replace = deadly  # type: ignore[assignment]
        Run(settings, teacher, Work(out, settings), progress=False)()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def main(kind: str, target: str, prompts: str, directory: str) -> None:
    torch.set_num_threads(1)  # a forked process has no other threads
    run._WRITTEN_AT_ONCE, run._SAVED_EVERY = 16, -1.0
    settings = Settings(kind, target, prompts, 40, 24, 5, 4, 5e-3, 2, 0, layers=1, width=32)
    teacher = Teacher(Path(target), "cpu", torch.float32)
    assert attempt(settings, teacher, Path(directory) / "whole", 0) == 0
    for number in range(1, 30):
        ended = attempt(settings, teacher, Path(directory) / "killed", number)
        if ended != -signal.SIGKILL:
            assert ended == 0
            print(number - 1)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
