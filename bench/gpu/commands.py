"""User commands: the kernels' own tests, ``foresay generate``, ``serve`` over HTTP, ``bench``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from bench.gpu.worker import Task
from bench.serving import COMMAND, FORESAY, exchange, started

ROOT = Path(__file__).resolve().parents[2]
PROMPT, SAMPLING = "Once upon a time", {"max_tokens": 48, "seed": 7, "temperature": 1.0, "top_p": 1.0}
#: The project's settings for pytest except those for packages that a machine with a GPU may lack.
_BARE = ["-o", "addopts=", "-o", "filterwarnings=", "--import-mode=importlib", "-p", "no:cacheprovider"]
_BARE.append("--confcutdir=tests/kernels/on_device")
#: What "timeout" returns if it had to end a command, and had to kill it.
_STOPPED = (124, 137)
#: A line of pytest's for one test, of one of several workers, or alone.
_VERDICT = re.compile(r"^(?:\[gw\d+\].*?([A-Z]+) (\S+::.+)|(\S+::.+) ([A-Z]+) +\[.*)$", re.MULTILINE)


def left(task: Task) -> float:
    """Seconds that a command may take: it is ended before the step that runs it."""
    return min(600.0, max(1.0, task.until - time.monotonic() - 3.0))


def run(task: Task, *arguments: str) -> Any:
    """The last line that one of our commands prints, as JSON. Raises RuntimeError with its result if it fails."""
    command = [*COMMAND, *arguments, "--json", "--device", task.device.torch.type]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left(task), check=False)
    if done.returncode:
        raise RuntimeError(f"foresay {arguments[0]} ended with {done.returncode}: {done.stderr[-1200:]}")
    return json.loads(done.stdout.splitlines()[-1])


def pytest_of(task: Task, tests: Sequence[str], together: bool) -> tuple[list[str], dict[str, str]]:
    """The command, many processes if not together, and its environment; on a CPU in Triton's interpreter."""
    spread = task.device.cuda and not together and find_spec("xdist") is not None
    workers = ["-n", str(max(2, (os.cpu_count() or 4) // 2))] if spread else []
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", *_BARE, *workers, *tests]
    there = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # with what was carried along
    more = {"PYTHONPATH": there, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return command, os.environ | more | ({} if task.device.cuda else {"TRITON_INTERPRET": "1"})


def kernel_tests(task: Task) -> None:
    """On the device."""
    run_tests(task, *pytest_of(task, task.settings.tests, together=False))


def sanitized(task: Task) -> None:
    """Under compute-sanitizer, which sees what is read or written outside of a tensor: each is memory of its own."""
    tool = ["compute-sanitizer", "--error-exitcode", "9"] if task.device.cuda else []
    if tool and which(tool[0]) is None:
        task.leave_out(tool[0], "not installed")
        return
    command, environment = pytest_of(task, task.settings.sanitized, together=True)
    run_tests(task, [*tool, *command], environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def run_tests(task: Task, command: list[str], environment: dict[str, str]) -> None:
    """Run pytest; results count even if it did not end in time."""
    path = task.lines.path.with_name(f"{task.name.replace(' ', '-')}.txt")
    ended = ["timeout", "-s", "INT", "-k", "3", f"{left(task):.0f}", *command]  # it then prints why tests failed
    with path.open("w") as result:
        code = subprocess.run(ended, cwd=ROOT, env=environment, stdout=result, stderr=result, check=False).returncode
    counts, failed = tested(text := path.read_text(errors="replace"))
    for name in failed:
        task.check("kernel test", False, test=name)
    task.lines.write(task.name, "kernel tests", counts, "tests", code=code, end=text[-300:])
    if code in _STOPPED:
        task.leave_out("kernel tests", after=sum(counts.values()))
    else:
        task.check("kernel tests", code == 0 and counts.get("PASSED", 0) > 0)


def tested(text: str) -> tuple[dict[str, int], list[str]]:
    """How many tests passed, failed and so on, and the names of those that failed."""
    found = _VERDICT.findall(text.partition(" short test summary info ")[0])
    verdicts = [(before or after, spread or alone) for before, spread, alone, after in found]
    counts = {verdict: sum(verdict == other for other, _ in verdicts) for verdict, _ in verdicts}
    return counts, [name for verdict, name in verdicts if verdict in ("FAILED", "ERROR")]


def generate(task: Task) -> None:
    """The text that ``foresay generate`` writes with the drafter in the step's name."""
    draft, flags = (task.name.split()[-1], [f"--{name.replace('_', '-')}={value}" for name, value in SAMPLING.items()])

    def written() -> dict[str, Any]:
        begun = time.monotonic()
        result = run(task, "generate", "--prompt", PROMPT, "--draft", draft, "--max-model-len", "512", *flags)
        return {"value": result["text"], "seconds": time.monotonic() - begun, "exact": result["exact_reason"]}

    task.take(f"text by {draft}", "", written)


def built(task: Task) -> None:
    """The result with drafts and without is the same."""
    auto, none = (task.lines.last(f"text by {draft}") for draft in ("auto", "none"))
    task.check("same text", auto is not None and auto == none, of="foresay generate, auto and none")


def serve(task: Task) -> None:
    """``foresay serve`` until it is ready; then one answer streamed and one not."""

    def over_http() -> dict[str, Any]:
        begun, flags = time.monotonic(), ["--device", task.device.torch.type, "--draft", "auto"]
        log = task.lines.path.with_name("serve.txt")
        with log.open("wb") as log_file, started([*FORESAY, *flags], "/ready", left(task), log_file) as (_, port):
            ready, body = time.monotonic() - begun, {"model": None, "prompt": PROMPT, **SAMPLING}
            streamed, whole = (exchange(port, body | {"stream": stream}) for stream in (True, False))
        task.check("streamed as whole", streamed.text == whole.text)
        task.check("same text", whole.text == task.lines.last("text by none"), of="over HTTP and foresay generate")
        return {"value": whole.seconds, "ready": ready, "first": streamed.arrivals[0], "events": len(streamed.arrivals)}

    task.take("answered over HTTP", "s", over_http)


def bench(task: Task) -> None:
    """``foresay bench`` of the bundled pair."""

    def measured() -> dict[str, Any]:
        [result] = run(task, "bench", "--rounds", "1", "--max-tokens", str(min(64, 4 * task.settings.tokens)))["ways"]
        task.check("same tokens", result["same_tokens"])
        rates = {f"{way}_tokens_per_second": result[way]["tokens_per_second"] for way in ("on", "off")}
        more = {"drafter": result["drafter"], "per_step": result["on"]["tokens_per_step"]}
        return {"value": result["speedup"]} | more | rates

    task.take("foresay bench", "times plain", measured)
