"""Clients from npm as their packages come: where ``make outside`` puts them, their versions, and how they are run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NODE = Path(__file__).parent / "node"
#: Outside of what git knows: they are large.
MODULES = Path(sys.prefix) / "clients" / "node_modules"
_PACKAGE = json.loads((NODE / "package.json").read_text("utf-8"))
PINS: dict[str, str] = _PACKAGE["dependencies"] | _PACKAGE["optionalDependencies"]
CLAUDE, CODEX = MODULES / "@anthropic-ai/claude-code/cli-wrapper.cjs", MODULES / "@openai/codex/bin/codex.js"
#: None of them takes more than some seconds; one that waits for something else waits for ever.
PATIENCE = 240.0

#: For tests that need them. Where CI is set they fail instead.
needs_npm = pytest.mark.skipif(
    (shutil.which("node") is None or not (MODULES / ".package-lock.json").exists()) and not os.environ.get("CI"),
    reason="make outside installs clients from npm, where node and npm are there",
)


def installed(package: str) -> str:
    """The version of a package that is there."""
    return str(json.loads((MODULES / package / "package.json").read_text("utf-8"))["version"])


def node(*command: str, home: Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in Node with a home of its own and nothing of this process's environment but the path."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)} | variables
    return subprocess.run(
        ["node", *command],
        env=environment,
        cwd=cwd or home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def script(name: str, url: str, home: Path) -> dict[str, object]:
    """What one of the scripts next to package.json prints, run where it finds the packages."""
    at = home / name
    at.write_text((NODE / name).read_text("utf-8"), "utf-8")
    if not (home / "node_modules").exists():
        (home / "node_modules").symlink_to(MODULES)
    done = node(str(at), home=home, FORESAY_URL=url)
    assert done.returncode == 0, done.stdout + done.stderr
    output: dict[str, object] = json.loads(done.stdout)
    return output
