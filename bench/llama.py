"""llama.cpp as a peer: a server for each file and each way of drafting, which gets the same requests over HTTP as ours.

Two builds of it: ``llama-server``, compiled for this machine, and the wheel ``xllamacpp``, newer but compiled for any
machine, whose server runs in its own Python (``bench/xllama.py``).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

#: Fields besides those of our requests: no prompt cache, and none of its default filters.
BODY = {"cache_prompt": False, "min_p": 0.0}
CONTEXT = 4096  # tokens of each request
DRAFTED = 4  # by a draft model, in a step
PLAIN, DRAFT = "plain", "draft-simple"

#: A way of drafting: ``plain``, ``draft-simple`` (with a draft model), or another of its ``--spec-type``.
Way = str


def compiled(
    program: Path, model: Path, way: Way, threads: int, slots: int, draft: Path | None = None, context: int = CONTEXT
) -> list[str]:
    """The command of ``llama-server``. model, draft: in GGUF; slots: requests at once, of ``context`` tokens each."""
    size = ["-t", str(threads), "-c", str(context * slots), "-np", str(slots)]
    drafting = [] if way == PLAIN else ["--spec-type", way]
    if way == DRAFT:
        drafting += ["-md", str(draft), "--spec-draft-n-max", str(DRAFTED), "-td", str(threads)]
    return [str(program), "-m", str(model), *size, "--no-webui", *drafting]


def prebuilt(python: Path, model: Path, way: Way, threads: int, slots: int) -> list[str]:
    """The same for xllamacpp. python: the one it is installed in."""
    size = [str(threads), str(CONTEXT * slots), str(slots)]
    return [str(python), str(Path(__file__).with_name("xllama.py")), str(model), way, *size]


def version(program: Path) -> str:
    """The version that ``llama-server`` reports."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).splitlines()[0].removeprefix("version: ")


def prebuilt_version(python: Path) -> str:
    """The version of the wheel."""
    code = "from importlib.metadata import version; print(version('xllamacpp'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
