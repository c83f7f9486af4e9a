"""``python -m bench.soak --minutes 10``: rounds with one drafter after the other, the first of them without harm."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from bench import record
from bench.drive import FROM_DIRECTORY, Options, engine_config, mode_of
from bench.http import ServerFailed
from bench.soak import report
from bench.soak.served import Served, started
from bench.soak.storm import Fault, Judge, Plain, Round, Tally, harms
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED

ENGINE_SECONDS = 4.0
#: Harm comes more often here than in any life: a request is resumed as often as it takes.
MANY = 1000
BUNDLED_DRAFTS = {flag: str(BUNDLED / flag) for flag in FROM_DIRECTORY.values() if (BUNDLED / flag).exists()}
TREES = ("draft_model:3,2,1", "medusa:3,2,1", "eagle3:4,3,2", "dflash:4,3,2")
MODES = ("auto", "ngram", "suffix", "draft_model:4", *TREES)


def flags(mode: str, known: Options, args: argparse.Namespace) -> list[str]:
    """What a server is started with that drafts in this way."""
    config = engine_config(mode, known)
    draft = mode if mode == "auto" else config.draft  # what a user gets who says nothing
    shared = [config.target, "--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    shared += [
        "--seed",
        "1",
        "--page-size",
        "8",
        "--max-seqs",
        str(args.max_seqs),
        "--threads",
        str(args.threads),
        "--draft",
        draft,
        "--no-log-stats",
    ]
    shared += ["--draft-tokens", str(config.draft_tokens)] if config.draft_tokens is not None else []
    return shared + (["--draft-tree", config.draft_tree] if config.draft_tree else [])


def options(args: argparse.Namespace) -> Options:
    """Where the drafters are; those that come with the bundled target unless others are named."""
    own = BUNDLED_DRAFTS if args.target == "bundled" else {}
    heads: dict[str, Any] = {name: getattr(args, name) or own.get(name) for name in FROM_DIRECTORY.values()}
    return Options(args.target, heads.pop("draft"), args.dtype, args.threads, **heads)


def engine_timeout() -> float | None:
    """Seconds after which a frozen engine is ended, if this server does that."""
    return ENGINE_SECONDS if "engine_timeout" in ServeConfig.__struct_fields__ else None


async def soak(args: argparse.Namespace, tally: Tally, rounds: list[Round]) -> None:
    """All rounds, and the comparisons to their end."""
    known = options(args)
    modes = [mode for mode in args.modes if known.has(mode)]
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "plain.log"
    async with AsyncExitStack() as stack:
        none = [*flags("none", known, args), "--no-prefix-cache"]
        _, port = await asyncio.to_thread(stack.enter_context, started(none, log))
        plain = Plain(port)
        stack.push_async_callback(plain.close)
        judge = Judge(plain, tally)
        tasks = [asyncio.create_task(judge.work()), asyncio.create_task(progress(tally, judge, rounds))]
        for number, mode in enumerate(modes):
            own = flags(mode, known, args)
            seconds = 60 * args.minutes * share(number, modes, args.calm)
            await one_round(mode, own, number > 0, seconds, args, judge, tally, rounds)
        await judge.settled()
        for task in tasks:
            task.cancel()


def share(number: int, modes: list[str], calm: float) -> float:
    """The part of the time that a mode has. calm: of the first one's."""
    if len(modes) == 1:
        return 1.0
    return (1 - calm) / (len(modes) - 1) if number else calm


async def one_round(
    mode: str,
    own: list[str],
    harmed: bool,
    seconds: float,
    args: argparse.Namespace,
    judge: Judge,
    tally: Tally,
    rounds: list[Round],
) -> None:
    """One server from its start to its end. Pages are few: requests wait, are preempted, push out what others left."""
    timeout = engine_timeout()
    own = [*own, "--max-resumes", str(MANY), "--kv-tokens", str(args.kv_tokens)] + (
        ["--engine-timeout", f"{timeout:g}"] if timeout else []
    )
    kills, freezes = (args.kills_per_minute, args.freezes_per_minute) if harmed else (0.0, 0.0)
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "serve.log"
    begun = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            process, port = await asyncio.to_thread(stack.enter_context, started(own, log))
            served = await stack.enter_async_context(Served(process, port, log))
            rounds.append(Round(mode, served, judge, tally, args.seed))
            left = begun + seconds - time.monotonic()
            await rounds[-1].run(left, harms(f"{args.seed} {mode}", kills, freezes, timeout))
    except (ServerFailed, ClientError, OSError) as error:
        told = f"{type(error).__name__}: {error}; its log is {log}"
        tally.faults.append(Fault("the server does not answer", mode, told))


async def progress(tally: Tally, judge: Judge, rounds: list[Round]) -> None:
    """A line every few seconds, on stderr."""
    begun, told = time.monotonic(), 0
    while True:
        await asyncio.sleep(5)
        counts, name = tally.counts, rounds[-1].name if rounds else "starting"
        figures = [f"{counts[what]} {what}" for what in ("requests", "compared", "kills", "failed steps", "freezes")]
        figures += [f"{judge.waiting} to compare", f"{len(tally.faults)} faults"]
        print(f"{time.monotonic() - begun:5.0f} s  {name:12}  {', '.join(figures)}", file=sys.stderr)
        for fault in tally.faults[told:]:
            print(json.dumps(asdict(fault)), file=sys.stderr)
        told = len(tally.faults)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Random requests, kills and freezes.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help="ways of drafting, one after the other")
    parser.add_argument("--kills-per-minute", type=float, default=3)
    parser.add_argument("--freezes-per-minute", type=float, default=3)
    parser.add_argument("--calm", type=float, default=0.3, help="part of the time without harm: memory is watched then")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", help="draft model, for the draft modes")
    parser.add_argument("--medusa", help="directory of Medusa heads, for the medusa modes")
    parser.add_argument("--eagle3", help="directory of an EAGLE-3 head, for the eagle3 modes")
    parser.add_argument("--dflash", help="directory of a DFlash head, for the dflash modes")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32", "float16"))
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=256)
    parser.add_argument("--max-seqs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    tally, rounds = Tally(), list[Round]()
    asyncio.run(soak(args, tally, rounds))
    found = report.results(tally, rounds)
    report.show(found)
    names = ("minutes", "seed", "kv_tokens", "max_model_len", "max_seqs", "threads")
    shape = {name: getattr(args, name) for name in names}
    record.finish("soak", {"target": Path(args.target).name, **shape, **found}, not args.no_save)
    sys.exit(not report.well(found))


if __name__ == "__main__":
    main()
