"""What .ci/run does when something fails: its commands are a Makefile of the test's own, pytest is real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Some of what .ci/run would install.
COMMANDS = ("chromium", "curl", "promtool", "node", "npm")
MAKEFILE = f"""
check openapi outside: ; @echo $@ >> made; test $(BROKEN) != $@
test: ; @echo $@ >> made; {sys.executable} -m pytest -q -p xdist -n 1 -p no:cacheprovider -c pytest.ini test_it.py
"""
TESTS = """
import pytest
@pytest.mark.parametrize("number", range(9))
def test_numbers(number):
    assert number != {wrong}
"""


def run(folder: Path, broken: str = "none", wrong: str = "9", **variables: str) -> tuple[int, str, list[str]]:
    """The status of a run, its last line, and what was made."""
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to(shutil.which("true") or "")
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "test_it.py").write_text(TESTS.format(wrong=wrong))
    (folder / "pytest.ini").write_text("[pytest]\n")
    # The hook alone: what else the suite's conftest imports is no part of this.
    source = (ROOT / "tests" / "conftest.py").read_text("utf-8")
    start, end = source.index("def pytest_runtest_logreport"), source.index("def pytest_collection_finish")
    (folder / "conftest.py").write_text(
        f"from __future__ import annotations\nimport contextlib, os\n{source[start:end]}"
    )
    environment = (
        os.environ
        | variables
        | {"BROKEN": broken, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    )
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout.splitlines()[-1], (folder / "made").read_text().split()


@pytest.mark.parametrize(
    ("broken", "wrong", "last"),
    [
        ("check", "9", "make check"),
        ("none", "5", "make test: test_it.py::test_numbers[5]"),
        ("none", "nobody_knows)", "make test: test_it.py"),  # which is no Python
        ("outside", "9", "make -j 2 outside"),
    ],
)
def test_the_last_line_of_a_red_run_says_what_failed_first(tmp_path, broken, wrong, last):
    status, line, _ = run(tmp_path, broken, wrong)
    assert status != 0 and line == f"==> failed first: {last}"


def test_clients_of_others_are_tried_last_if_there_is_time(tmp_path):
    (tmp_path / "soon").mkdir()
    (tmp_path / "late").mkdir()
    assert run(tmp_path / "soon")[::2] == (0, ["check", "openapi", "test", "outside"])
    status, line, made = run(tmp_path / "late", OUTSIDE_WITHIN="0")
    assert (status, made) == (0, ["check", "openapi", "test"]) and line.startswith("==> make outside is left out")
