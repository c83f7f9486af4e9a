"""Commands in processes of their own that are born with everything imported: most of them end before that has paid.

They are forked from a server process that imported this module, which has no other threads.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foresay.server.cli.main import main

SECONDS = 300.0

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        __name__,
        "foresay.drafters.training.run",
        "foresay.server.cli.serving",
        "foresay.server.engine.build",
        "transformers.models.llama.modeling_llama",
    ]
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended. status: its exit status; out, err: what it printed."""

    status: int
    out: str
    err: str


def foresay(
    words: list[str], largest_file: int = resource.RLIM_INFINITY, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end, in a process that can make no file larger than so many bytes.

    variables: all settings that it finds in its environment.
    """
    with TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        status = exit_status(_command, words, largest_file, dict(variables or {}), out, err)
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


def _command(words: list[str], largest_file: int, variables: dict[str, str], out: Path, err: Path) -> None:
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    for name in [name for name in os.environ if name.startswith("FORESAY_")]:
        del os.environ[name]
    os.environ.update(variables)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    torch.set_num_threads(1)
    sys.exit(main(words))
