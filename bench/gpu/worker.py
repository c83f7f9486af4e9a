"""The results of a call, and the processes that produce them.

Each measurement is one JSON line, written to disk before anything else happens: a call that is cut off anywhere has
reported all its results. Steps run in workers, forked from a parent that never touches the GPU: one that hangs, dies or
breaks the GPU does not affect the others, and the next worker continues with the next step.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import plain

#: What belongs to every line; the rest of it is what the measurement was made with.
COMMON = ("run", "card", "t", "step", "what", "value", "unit")
#: ``unit`` of lines that measure nothing: something raised; was left out; a check that passed or not; how a step ended.
FAILED, LEFT_OUT, CHECK, ENDED = "failed", "left out", "check", "outcome"
#: How steps end whose process can run another one, and whose own lines say what did not hold.
ORDERLY = ("held", "failed", "unfinished")
#: In errors after which the GPU no longer responds in this process; Triton's are worded differently.
BROKEN = re.compile(r"CUDA error|Triton Error \[CUDA\]|device-side assert|CUBLAS_STATUS|cudaError")


class Broken(RuntimeError):
    """The GPU no longer responds in this process."""


class Lines:
    """The file of one run, on one card; it does not read lines that other runs wrote, perhaps on another card. spent:
    seconds that the call has taken before this."""

    def __init__(self, path: Path, call: str, card: str = "", spent: float = 0.0) -> None:
        self.path, self.card, self.begun = path, card, time.monotonic() - spent
        self.run = f"{call} {time.time():.0f}.{os.getpid()}"

    @property
    def now(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.begun

    def write(self, step: str, what: str, value: Any, unit: str = "", **context: Any) -> None:
        """Append a line by one write, flush it to disk, then print it."""
        common = (self.run, self.card, round(self.now, 3), step, what, value, unit)
        line = plain(dict(zip(COMMON, common, strict=True)) | context)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, json.dumps(line, default=str).encode() + b"\n")
        os.fsync(file)
        os.close(file)
        sys.stdout.write(line_text(line) + "\n")  # by one write: other processes print too
        sys.stdout.flush()

    def read(self) -> list[dict[str, Any]]:
        """The lines of this run."""
        return [line for line in map(json.loads, self.path.read_text().splitlines()) if line["run"] == self.run]

    def last(self, what: str, **context: Any) -> Any:
        """The newest value of this name that was made with this context; None if there is none."""
        fits = (line for line in reversed(self.read()) if line["what"] == what and context.items() <= line.items())
        return next((line["value"] for line in fits if line["unit"] not in (FAILED, LEFT_OUT)), None)


def line_text(line: dict[str, Any]) -> str:
    """A line for people: when, in which step, what, how much, and the short values of what it was made with."""
    more = [f"{name}={value}" for name, value in line.items() if name not in COMMON and len(str(value)) < 60]
    value, unit = line["value"], line["unit"]
    if unit == "s" and isinstance(value, float):
        value, unit = (1e3 * value, "ms") if value >= 1e-3 else (1e6 * value, "us")
    number = f"{value:.4g}" if isinstance(value, float) else str(value)[:300]
    return f"[{line['t']:8.3f}] {line['step']} | {' '.join([line['what'], *more])} | {number} {unit}".rstrip()


@dataclass(slots=True)
class Task:
    """The argument of a step. until: when it should have ended, by :func:`time.monotonic`. kept: results of this
    process' steps for later ones. silent: only failures are written. missing: how much was left out."""

    name: str
    lines: Lines
    until: float
    device: Any
    settings: Any
    kept: dict[Any, Any] = field(default_factory=dict)
    silent: bool = False
    failures: int = 0
    missing: int = 0

    def take(self, what: str, unit: str, call: Callable[..., Any], *given: Any, **context: Any) -> Any:
        """One measurement: writes what ``call`` returns (of a dict ``value``, and the rest as context). None if there
        is no time for it, or it raised; Broken if the GPU no longer responds."""
        if time.monotonic() > self.until:
            self.leave_out(what, **context)
            return None
        try:
            found = call(*given)
        except Exception as error:  # other measurements may still succeed
            self.failed(what, error, **context)
            return None
        more = found if isinstance(found, dict) else {"value": found}
        if not self.silent:
            self.lines.write(self.name, what, **({"unit": unit} | context | more))
        self.device.free()  # a graph keeps its memory until it is collected
        return more["value"]

    def leave_out(self, what: str, why: str = "no time", **context: Any) -> None:
        """Write what was not done."""
        if not self.silent:
            self.missing += 1
            self.lines.write(self.name, what, why, LEFT_OUT, **context)

    def check(self, what: str, good: bool, **context: Any) -> None:
        """Write a condition that has to hold."""
        self.failures += not good
        if not self.silent:
            self.lines.write(self.name, what, bool(good), CHECK, **context)

    def failed(self, what: str, error: Exception, **context: Any) -> None:
        """Write what was raised, and check whether the GPU still responds."""
        traceback.print_exc()
        self.failures += 1
        text = f"{type(error).__name__}: {error}"
        self.lines.write(self.name, what, text[:1500], FAILED, **context)
        try:
            self.device.free()
        except Exception as worse:
            raise Broken(what) from worse
        if BROKEN.search(text):
            raise Broken(what) from error

    def run(self, function: str) -> str:
        """Run ``module:function``; how it ended: "held", "failed", "unfinished" if something was left out, "broken"."""
        module, _, name = function.rpartition(":")
        with suppress(Broken):
            try:
                getattr(import_module(f"bench.gpu.{module}" if "." not in module else module), name)(self)
            except Broken:
                raise
            except Exception as error:
                self.failed("the step", error)
            return "failed" if self.failures else "unfinished" if self.missing else "held"
        return "broken"


class Worker:
    """A process that runs steps, without raising their errors. start: "fork"; "spawn" if that cannot use a GPU."""

    start = "fork"

    def __init__(self, lines: Lines, device: Any, settings: Any) -> None:
        context: Any = multiprocessing.get_context(self.start)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, lines, device, settings), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, name: str, function: str, until: float) -> None:
        """Make it run a step; a dead one shows this by its outcome."""
        with suppress(OSError):
            self._pipe.send((name, function, until))

    def outcome(self, limit: float) -> str:
        """How the step ended (:meth:`Task.run`), or "died"; "stopped", if it has not ended after so many seconds."""
        try:
            return str(self._pipe.recv()) if self._pipe.poll(max(0.0, limit)) else "stopped"
        except (EOFError, OSError):
            return "died"

    def end(self) -> None:
        """Kill it and all that it started, and wait a little: a process that hangs inside the driver remains."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join(3.0)
        self._pipe.close()


def _serve(pipe: Any, lines: Lines, device: Any, settings: Any) -> None:
    """Run the steps that come through the pipe; Linux ends this process when its parent is gone."""
    import_module("torch").set_grad_enabled(False)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    kept: dict[str, Any] = {}
    while True:
        name, function, until = pipe.recv()
        pipe.send(Task(name, lines, until, device, settings, kept).run(function))
