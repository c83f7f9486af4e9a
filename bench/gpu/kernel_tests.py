"""Part a: the kernels' own tests, by pytest in a process of its own: a broken kernel takes nothing else along."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.device import Device

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/kernels/on_device"
#: What a rehearsal runs, in Triton's interpreter.
TINY_TESTS = (f"{TESTS}/test_move.py", "-k", "values")
#: The project's settings but for those that want packages which a machine with a GPU may lack: kernels need none.
_PLUGINS = ("-p", "no:cacheprovider", f"--confcutdir={TESTS}")
_BARE = ("-o", "addopts=", "-o", "filterwarnings=", "--import-mode=importlib", *_PLUGINS)


@dataclass(frozen=True, slots=True)
class Tested:
    """What pytest said. failures: names of tests that failed. ended: whether it came to its end in time."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]
    ended: bool
    last_lines: list[str]

    @property
    def good(self) -> bool:
        """Whether tests ran, and none failed."""
        return self.ended and self.passed > 0 and not self.failed


class Running:
    """pytest at work on the device (in Triton's interpreter on a CPU), until it is waited for."""

    def __init__(self, device: Device, selection: Sequence[str]) -> None:
        there = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # what was carried along is found there
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(there))
        environment.pop("TRITON_INTERPRET", None)
        if not device.cuda:
            environment["TRITON_INTERPRET"] = "1"
        workers = max(2, (os.cpu_count() or 4) - 4)  # most of their time is compiling
        spread = ["-n", str(workers)] if device.cuda and find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", *_BARE, *spread, *selection]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read when it has ended
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._said, stderr=self._said)

    def finish(self, limit: float) -> Tested:
        """What it says, after ``limit`` seconds at the latest; it is stopped then."""
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        self._said.seek(0)
        with self._said as file:
            return read(file.read(), ended=code in (0, 1))


def read(said: str, ended: bool) -> Tested:
    """From pytest's output."""
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return Tested(counts.get("passed", 0), failed, counts.get("skipped", 0), failures, ended, said.splitlines()[-8:])
