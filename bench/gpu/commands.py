"""What users run, as they run it: the kernels' own tests, ``foresay generate``, ``serve`` asked over HTTP, ``bench``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FORESAY = [sys.executable, "-m", "foresay.server.cli.main"]
PROMPT, ASKED = "Once upon a time", {"max_tokens": 48, "seed": 7}
#: Seconds before a step has to have ended, at which what it started is ended.
_EARLY = 3.0
#: The project's settings for pytest but for those that want packages which a machine with a GPU may lack.
_BARE = ("-o", "addopts=", "-o", "filterwarnings=", "--import-mode=importlib", "-p", "no:cacheprovider")
_VERDICTS = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(\S+::.*?) )?(PASSED|FAILED|ERROR|SKIPPED)(?: (\S+::.*?))?(?: +\[ *\d+%\])?$", re.MULTILINE)  # fmt: skip


def environment(task: Any) -> dict[str, str]:
    """Of a command: ours is found, and in tests, many at once, each has one thread."""
    there = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # what was carried along is found there
    found = dict(os.environ, PYTHONPATH=os.pathsep.join(there), PYTHONUNBUFFERED="1")
    found.pop("TRITON_INTERPRET", None)
    return found if task.device.cuda else found | {"TRITON_INTERPRET": "1"}


def left(task: Any) -> float:
    """Seconds that a command may take."""
    return float(min(600.0, max(1.0, task.until - time.monotonic() - _EARLY)))


def run(task: Any, *arguments: str) -> str:
    """The last line that a command of ours prints. Raises RuntimeError with what it says if it fails."""
    command = [*FORESAY, *arguments, "--device", task.device.torch.type]
    environ = environment(task)
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=left(task), check=False)
    if done.returncode:
        raise RuntimeError(f"foresay {arguments[0]} ended with {done.returncode}: {done.stderr[-1200:]}")
    return done.stdout.splitlines()[-1]


def kernel_tests(task: Any) -> None:
    """By pytest on the device (in Triton's interpreter on a CPU); what is said counts even where it did not end."""
    chosen = task.settings.tests
    spread = ["-n", str(max(2, (os.cpu_count() or 4) - 4))] if task.device.cuda and find_spec("xdist") else []
    conftest = f"--confcutdir={chosen[0] if chosen[0].endswith('on_device') else Path(chosen[0]).parent}"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", *_BARE, conftest, *spread, *chosen]
    path = task.lines.path.with_name("tests.txt")
    with path.open("w") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(task) | {"OMP_NUM_THREADS": "1"}, stdout=said, stderr=said)
        try:
            code: int | str = process.wait(left(task))
        except subprocess.TimeoutExpired:
            process.terminate()
            code = "not done in time"
    text = path.read_text(errors="replace")
    counts = tested(text)
    for name in counts.pop("failed"):
        task.check("kernel test", False, test=name)
    task.lines.write(task.name, "kernel tests", counts["PASSED"], "passed", **counts, code=code, end=text[-300:])
    task.check("kernel tests", code == 0 and counts["PASSED"] > 0)


def tested(said: str) -> dict[str, Any]:
    """How many tests passed, failed and so on, and the names of those that failed, from what pytest prints of each."""
    counts: dict[str, Any] = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0, "failed": []}
    for before, verdict, behind in _VERDICTS.findall(said.partition(" short test summary info ")[0]):
        counts[verdict] += 1
        if verdict in ("FAILED", "ERROR"):
            counts["failed"].append(before or behind)
    return counts


def generate(task: Any) -> None:
    """The text that ``foresay generate`` writes by the drafter that the step's name says."""
    draft = task.name.split()[-1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ASKED.items()]

    def written() -> dict[str, Any]:
        begun = time.monotonic()
        said = json.loads(run(task, "generate", "--prompt", PROMPT, "--draft", draft, "--json", "--max-model-len", "512", *flags))
        return {"value": said["text"], "seconds": time.monotonic() - begun, "exact": said["exact_reason"]}

    task.take(f"text by {draft}", "", written)


def built(task: Any) -> None:
    """What was written with drafts and without is the same."""
    auto, none = (task.lines.last(f"text by {draft}") for draft in ("auto", "none"))
    task.check("same text", auto == none and auto is not None, of="foresay generate, auto and none")


def serve(task: Any) -> None:
    """``foresay serve`` until it is ready; then one answer streamed and one not."""
    from bench.http import exchange, running

    errors = task.lines.path.with_name("serve.txt")

    def asked() -> dict[str, Any]:
        begun = time.monotonic()
        flags = ["--device", task.device.torch.type, "--draft", "auto"]
        with errors.open("wb") as said, running(flags, left(task), said) as (_, port):
            ready = time.monotonic() - begun
            body = {"model": None, "prompt": PROMPT, **ASKED}
            streamed, whole = (exchange(port, body | {"stream": stream}) for stream in (True, False))
        task.check("streamed as whole", streamed.text == whole.text)
        task.check("same text", whole.text == task.lines.last("text by none"), of="over HTTP and foresay generate")
        return {"value": whole.seconds, "ready": ready, "first": streamed.arrivals[0], "events": streamed.events}

    task.take("answered over HTTP", "s", asked)


def bench(task: Any) -> None:
    """``foresay bench`` of the bundled pair."""

    def measured() -> dict[str, Any]:
        said = json.loads(run(task, "bench", "--json", "--rounds", "1", "--max-tokens", str(min(64, 4 * task.settings.tokens))))
        task.check("same tokens", said["same_tokens"])
        rates = {f"tokens_per_second_{way}": said[way]["tokens_per_second"] for way in ("on", "off")}
        return {"value": said["speedup"], "drafter": said["drafter"], "per_step": said["on"]["tokens_per_step"], **rates}

    task.take("foresay bench", "times plain", measured)
