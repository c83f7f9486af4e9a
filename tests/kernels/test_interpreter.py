"""Every kernel against its reference in Triton's interpreter, which needs no GPU.

The interpreter is chosen when triton is imported, so the tests of ``on_device`` run in a process of their own: one for
all, since torch and triton are imported for seconds. Where there is a GPU, pytest also runs them as they are, compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(__file__).parent / "on_device"


@pytest.mark.parametrize(
    "marked", [pytest.param("not soak", marks=pytest.mark.slow), pytest.param("soak", marks=pytest.mark.soak)]
)
def test_all_in_the_interpreter(marked: str) -> None:
    # The suite's own conftest would import clients and servers for seconds.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, f"--confcutdir={TESTS}"]
    command.append(str(TESTS))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
