"""``foresay launch``, with coding agents as their packages come and a home of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.npm import CLAUDE, CODEX, MODULES, PATIENCE
from tests.server.live import ROOT

#: What is run for an agent's command, as npm's links would have it if scripts of packages had been run.
PROGRAMS = {
    "claude": f"node {CLAUDE}",
    "codex": f"node {CODEX}",
    "cn": f"node {MODULES}/@continuedev/cli/dist/cn.js",
    "copilot": f"node {MODULES}/@github/copilot/npm-loader.js",
    "opencode": f"{MODULES}/opencode-linux-x64/bin/opencode",
    "aider": f"{sys.prefix}/aider/bin/aider",
    "llm": f"{sys.prefix}/llm/bin/llm",
}


def run(work: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may use the agents, in ``work`` with a home of their own. Of this process's environment it has
    nothing but the path."""
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    for name, program in PROGRAMS.items():
        (home / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (home / name).chmod(0o755)
    environment = {"PATH": f"{home}:{os.environ['PATH']}", "HOME": str(home)} | variables
    return subprocess.run(
        command, env=environment, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


def launched(name: str, url: str, work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``foresay launch NAME`` on a server that is there."""
    line = [sys.executable, "-m", "foresay.server.cli", "launch", name, "--url", url, "--", *words]
    return run(work, *line, PYTHONPATH=str(ROOT))
