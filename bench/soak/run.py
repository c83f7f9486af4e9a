"""Random requests, cancels, sockets, kills and freezes: ``python -m bench soak --minutes 10``.

Rounds with one drafter after the other, the first of them without harm. Every answer is compared with plain decoding
(:mod:`bench.soak`); the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from bench.drive import Options, add_arguments, engine_config, mode_of
from bench.serving import ServerFailed
from bench.soak import report
from bench.soak.served import Served, started
from bench.soak.storm import Fault, Judge, Plain, Round, Tally, harms

ENGINE_SECONDS = 4.0
#: Harm is more frequent here than in practice: a request is resumed as often as necessary.
MANY = 1000
TREES = ("draft_model:3,2,1", "medusa:3,2,1", "eagle3:4,3,2", "dflash:4,3,2")
MODES = ("auto", "ngram", "suffix", "draft_model:4", *TREES)


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.set_defaults(threads=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help="ways of drafting, one after the other")
    parser.add_argument("--kills-per-minute", type=float, default=3)
    parser.add_argument("--freezes-per-minute", type=float, default=3)
    parser.add_argument("--calm", type=float, default=0.3, help="part of the time without harm: memory is watched then")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=256)
    parser.add_argument("--max-seqs", type=int, default=6)


def main(args: Namespace) -> dict[str, Any]:
    tally, rounds = Tally(), list[Round]()
    asyncio.run(soak(args, tally, rounds))
    found = report.results(tally, rounds)
    report.show(found)
    names = ("minutes", "seed", "kv_tokens", "max_model_len", "max_seqs", "threads")
    shape = {name: getattr(args, name) for name in names}
    return {"target": Path(args.target).name, **shape, **found, "holds": report.well(found)}


def flags(mode: str, options: Options, args: Namespace) -> list[str]:
    """The flags of a server that drafts in this way."""
    config = engine_config(mode, options)
    values = {
        "dtype": args.dtype,
        "max-model-len": args.max_model_len,
        "seed": 1,
        "page-size": 8,
        "max-seqs": args.max_seqs,
        "threads": args.threads,
        "draft": mode if mode == "auto" else config.draft,  # the default
        "draft-tokens": config.draft_tokens,
        "draft-tree": config.draft_tree,
    }
    given = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return [config.target, "--no-log-stats", *given]


async def soak(args: Namespace, tally: Tally, rounds: list[Round]) -> None:
    """All rounds, and the comparisons to their end."""
    options = Options.of(args).with_bundled()
    modes = [mode for mode in args.modes if options.has(mode)]
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "plain.log"
    async with AsyncExitStack() as stack:
        none = [*flags("none", options, args), "--no-prefix-cache"]
        _, port = await asyncio.to_thread(stack.enter_context, started(none, log))
        plain = Plain(port)
        stack.push_async_callback(plain.close)
        judge = Judge(plain, tally)
        tasks = [asyncio.create_task(judge.work()), asyncio.create_task(progress(tally, judge, rounds))]
        for number, mode in enumerate(modes):
            seconds = 60 * args.minutes * share(number, modes, args.calm)
            await one_round(mode, flags(mode, options, args), seconds, args, judge, tally, rounds)
        await judge.settled()
        for task in tasks:
            task.cancel()


def share(number: int, modes: list[str], calm: float) -> float:
    """A mode's part of the time. calm: the first one's."""
    if len(modes) == 1:
        return 1.0
    return (1 - calm) / (len(modes) - 1) if number else calm


async def one_round(
    mode: str, own: list[str], seconds: float, args: Namespace, judge: Judge, tally: Tally, rounds: list[Round]
) -> None:
    """One server from its start to its end, the first one without harm. Pages are few, so that requests wait, are
    preempted and evict what others left."""
    own = [*own, "--max-resumes", str(MANY), "--kv-tokens", str(args.kv_tokens), f"--engine-timeout={ENGINE_SECONDS:g}"]
    kills, freezes = (args.kills_per_minute, args.freezes_per_minute) if rounds else (0.0, 0.0)
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "serve.log"
    begun = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            process, port = await asyncio.to_thread(stack.enter_context, started(own, log))
            served = await stack.enter_async_context(Served(process, port, log))
            rounds.append(Round(mode, served, judge, tally, args.seed))
            left = begun + seconds - time.monotonic()
            await rounds[-1].run(left, harms(f"{args.seed} {mode}", kills, freezes, ENGINE_SECONDS))
    except (ServerFailed, ClientError, OSError) as error:
        what = f"{type(error).__name__}: {error}; its log is {log}"
        tally.faults.append(Fault("the server does not answer", mode, what))


async def progress(tally: Tally, judge: Judge, rounds: list[Round]) -> None:
    """A line every few seconds, on stderr."""
    begun, shown = time.monotonic(), 0
    while True:
        await asyncio.sleep(5)
        counts, name = tally.counts, rounds[-1].name if rounds else "starting"
        figures = [f"{counts[what]} {what}" for what in ("requests", "compared", "kills", "failed steps", "freezes")]
        figures += [f"{judge.waiting} to compare", f"{len(tally.faults)} faults"]
        print(f"{time.monotonic() - begun:5.0f} s  {name:12}  {', '.join(figures)}", file=sys.stderr)
        for fault in tally.faults[shown:]:
            print(json.dumps(asdict(fault)), file=sys.stderr)
        shown = len(tally.faults)
