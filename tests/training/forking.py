"""A training run in a process of its own that is killed where it hurts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from foresay.drafters.training import run
from foresay.drafters.training.run import Run
from foresay.drafters.training.run_folder import RunFolder
from foresay.drafters.training.settings import Settings
from foresay.drafters.training.teacher import Teacher


def attempt(settings: Settings, out: Path, dies_at: int) -> None:
    """A training run that is killed right before it puts its ``dies_at``-th file where it belongs (0: never).

    The file it has written is cut in half. State is saved after every step.
    """
    replace, seen = os.replace, 0

    def deadly(source: Path, goal: Path) -> None:
        nonlocal seen
        seen += 1
        if seen == dies_at:
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, goal)

    torch.set_num_threads(1)
    os.replace = deadly  # type: ignore[assignment]
    run._SAVED_EVERY = -1.0
    teacher = Teacher(Path(settings.target), "cpu", torch.float32)
    Run(settings, teacher, RunFolder(out, settings), progress=False)()
