"""``python -m bench.gpu A|B|C``: a call on a machine with a GPU; ``bench/gpu/quarter_hour.sh`` starts it.

Every measurement is a line of ``lines.jsonl`` in the folder OUT. Exit code: 0 if everything ran and every check passed
(the last line is then "done"); 1 if a check or a step failed; 2 for invalid arguments; 3 if a package or a GPU is
missing, and nothing was begun; 4 if nothing failed and something was left out.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import plan
from bench.gpu.plan import GRACE, Step
from bench.gpu.worker import ENDED, LEFT_OUT, ORDERLY, Lines, Worker

#: The imports of all steps of any call, ours last.
NEEDED = (
    "msgspec", "llguidance", "torch", "triton", "transformers", "tokenizers", "safetensors", "aiohttp", "jinja2",
    "numpy", "llvmlite", "prometheus_client", "rich", "pytest", "foresay.verifier.ops.kernels.linear",
    "foresay.server.cli.main", "foresay.server.engine.drafters.registry", "foresay.server.engine_process.local",
    *(f"bench.gpu.{name}" for name in ("smoke", "steps", "profile", "kernels", "commands")), "bench.hybrids",
)  # fmt: skip
DONE, MISSING, UNKNOWN = 0, 3, "a GPU not asked yet"
#: Seconds needed to begin a step; after which even a rehearsal's step counts as hanging.
LEAST, REHEARSED = 3.0, 600.0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(prog="bench/gpu/quarter_hour.sh", description="What a GPU makes of Foresay.")
    parser.add_argument("call", choices=tuple(plan.CALLS), help="A: steps; B: kernels, commands; C: models")
    parser.add_argument("--plan", action="store_true", help="print the schedule and stop")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small shapes: its figures mean nothing")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[""], help="and the first ones: run no others")
    parser.add_argument("--spent", type=float, default=0.0, metavar="SECONDS", help="of the call, before this began")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run a call; the exit code."""
    args = arguments(given)
    if args.plan:
        print(plan.shown(args.call))
        return DONE
    out = Path(os.environ.get("OUT", "gpu-results"))
    out.mkdir(parents=True, exist_ok=True)
    lines = Lines(out / "lines.jsonl", args.call, "CPU, a rehearsal" if args.rehearse else UNKNOWN, args.spent)
    missing = missing_of(NEEDED)
    lines.write("preflight", "missing", missing, "modules")
    if missing:
        print(f"not begun: {', '.join(missing)} cannot be imported; WHEELS names a folder of wheels", file=sys.stderr)
        return MISSING
    from bench.gpu import report, settings
    from bench.gpu.device import Device

    steps = plan.chosen(args.call, args.only)
    device, chosen = (Device("cpu" if args.rehearse else "cuda"), settings.tiny() if args.rehearse else settings.full())
    Call(lines, device, chosen, math.inf if args.rehearse else plan.CALLS[args.call] - plan.REPORT).run(steps)
    if lines.card == UNKNOWN:
        print("not begun: no GPU answers", file=sys.stderr)
        return MISSING
    return report.finish(lines)


def missing_of(names: Sequence[str]) -> list[str]:
    """Import all of these; the names of missing packages, and of broken ones with their errors."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            found.append(error.name or name)
        except Exception as error:  # a broken one is of no more use
            found.append(f"{name} ({error})")
    return list(dict.fromkeys(found))


def learn(lines: Lines) -> None:
    """Take over the results of the first steps for later processes: the card, and whether kernels overlap."""
    from foresay.verifier.ops.kernels import pdl

    lines.card = lines.last("device") or lines.card
    pdl.PDL = bool(lines.last("overlap"))
    os.environ["TRITON_PDL"] = str(int(pdl.PDL))  # for commands


class Call:
    """Runs steps, each in a worker, and writes how each ended. last: when the call must have ended, in seconds."""

    def __init__(self, lines: Lines, device: Any, settings: Any, last: float) -> None:
        self.lines, self.last, self._given = lines, last, (lines, device, settings)
        self._worker: Worker | None = None
        self._behind: list[tuple[Step, Worker, float]] = []

    def run(self, steps: Sequence[Step]) -> None:
        """All of them, in order; none after the one that finds no GPU."""
        for step, end in zip(steps, plan.ends(steps), strict=True):
            if step.quiet:
                self._settle()
            if self.lines.now > self.last - LEAST:
                self.lines.write(step.name, "the step", "no time", LEFT_OUT)
                continue
            apart = step.alone or step.background
            worker = (None if apart else self._worker) or Worker(*self._given)
            until = self._until(step, end)
            worker.begin(step.name, step.function, self.lines.begun + until)
            if step.background:
                self._behind.append((step, worker, until))
                continue
            useful = self._ended(step, worker, until + GRACE) and not step.alone
            if not useful:
                worker.end()
            if not apart:
                self._worker = worker if useful else None
            elif self.lines.card == UNKNOWN:
                if Worker.start == "spawn":
                    return
                Worker.start = "spawn"  # if an import touched the GPU, no fork of this process can
                return self.run(steps)
        self._settle()
        if self._worker is not None:
            self._worker.end()

    def _until(self, step: Step, end: float) -> float:
        """When a step should have ended: as planned, and in half of its time if those before it took longer."""
        if self.last == math.inf:
            return math.inf
        least, most = self.lines.now + step.seconds / 2, self.lines.now + step.seconds
        return min(self.last, most if step.background else min(max(least, end), most))

    def _ended(self, step: Step, worker: Worker, limit: float) -> bool:
        """Wait for a step; whether its worker is still usable."""
        outcome = worker.outcome(min(limit, self.last, self.lines.now + REHEARSED) - self.lines.now)
        if step.alone:
            learn(self.lines)
        self.lines.write(step.name, "the step", outcome, ENDED)
        return outcome in ORDERLY

    def _settle(self) -> None:
        """Wait for what runs in the background, and stop what takes too long."""
        for step, worker, until in self._behind:
            self._ended(step, worker, until)
            worker.end()
        self._behind.clear()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # does not wait for a process that hangs inside the driver
