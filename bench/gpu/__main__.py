"""``python -m bench.gpu``: one command for a machine with an NVIDIA GPU.

It needs torch 2.11 or newer, Triton 3.6 or newer, no network and no weights beyond the bundled ones. It ends with a
table of bars and one JSON line, in at most eight minutes; parts that no longer fit are left out and named. Exit code: 0
if every part ran and every check held, 1 if not, 2 where there is no GPU, 3 if ``--resume`` has parts left to run.
``--device cpu --tiny`` rehearses it; ``bench/gpu/half_hour.sh`` runs it until everything was asked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from bench import record
from bench.gpu import bars, settings
from bench.gpu.compiling import SWEEP, compile_model
from bench.gpu.device import Device, NoGpu
from bench.gpu.gaps import compile_ways
from bench.gpu.parts import run_all
from bench.gpu.session import Broken, Clock, Session


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="What a GPU makes of Foresay.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal, whose figures mean nothing")
    parser.add_argument("--limit", type=float, default=settings.LIMIT, help="seconds for everything (default: 480)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts alone (the first letters will do)")
    parser.add_argument("--no-save", action="store_true", help="do not write the result; --tiny needs --results for it")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the result is written (bench/results)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is found there after each part; go on")
    parser.add_argument("--compile-only", metavar="MODEL", help="compile the kernels of one model's shape and stop")
    args = parser.parse_args(given)
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu takes --tiny: the large shapes are for a GPU")
    if args.limit <= 0:
        parser.error("--limit must be above 0 seconds")
    return args


def main(given: list[str] | None = None) -> int:
    """Run it; the exit code."""
    args = arguments(given)
    torch.set_grad_enabled(False)
    try:
        device = Device(args.device)
        session = Session(device, settings.tiny() if args.tiny else settings.full(), Clock(args.limit))
        if args.resume is not None:
            session.resume(args.resume)
    except (NoGpu, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    chosen = session.settings
    if args.compile_only == SWEEP:
        print(f"{compile_ways(device)} ways")
        return 0
    if args.compile_only:
        shape = next(model for model in chosen.models if model.name == args.compile_only)
        print(f"{shape.name}: {compile_model(device, shape, chosen.rows, chosen.contexts)} calls")
        return 0
    try:
        run_all(session, args)
    except Broken:
        return 3
    return finish(session, args)


def finish(session: Session, args: argparse.Namespace) -> int:
    """The last table, what was left out, the record."""
    verdicts = bars.verdicts(session.measured, args.tiny)
    bars.show(verdicts)
    for what in session.clock.skipped:
        print(f"left out for want of time: {what}")
    for failure in session.failures:
        print(f"FAILED: {failure}")
    if args.tiny:
        print("a rehearsal: these figures mean nothing")
    record.finish(
        "gpu",
        {
            "target": session.settings.bar.name,
            "dtype": str(session.device.dtype).removeprefix("torch."),
            "rehearsal": args.tiny,
            "gpu": session.device.identity(),
            "bars": bars.as_json(verdicts),
            **session.found,
            "left_out": session.clock.skipped,
            "failures": session.failures,
            "total_seconds": session.clock.spent,
        },
        save=not args.no_save and (not args.tiny or args.results is not None),
        folder=args.results,
    )
    if session.kept is not None and session.clock.skipped:
        return 3
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
