"""A machine that does something else beside: ``python -m bench.busy --target DIR``.

How much of its quiet speed decoding keeps while as many processes as there are cores, or as ``--processes`` says, each
want one, with the threads that give way to them and with all threads always; the four in turns in one process. And in
how many seconds a server is ready, quiet and busy in turns.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import prompts, record
from bench.decode import progress
from bench.drive import Options, add_arguments, build, mode_of, request, run
from bench.http import server
from bench.stats import paired_ratio, spread
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.kernels.cpu import threads

#: Whether threads give way, by what that is called.
WAYS = {"giving way": True, "all threads": False}
#: Tokens before those that are timed: the machine has become quiet or busy just now.
_SETTLING = 48


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that want a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def speed(engine: Engine, prompt: Sequence[int], tokens: int, seed: int) -> float:
    """Tokens per second behind the first ones."""
    for size in (_SETTLING, tokens):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=size, ignore_eos=True)
        done = run(engine, request(prompt, params))
    return done.tokens_per_second


def decoding(engine: Engine, asked: dict[str, list[int]], args: argparse.Namespace) -> dict[str, object]:
    """Speeds of all four, and what is kept of the quiet ones."""
    taken: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order, begun = random.Random(args.seed), time.perf_counter()
    for turn in range(args.rounds):
        for name, prompt in asked.items():
            for count in order.sample((0, args.processes), 2):
                with others(count):
                    for way in order.sample(sorted(WAYS), 2):
                        threads.give_way(WAYS[way])
                        taken[way, count][name].append(speed(engine, prompt, args.max_tokens, turn))
            progress(f"round {turn + 1}/{args.rounds}, {name}", begun)
    threads.give_way(True)
    quiet, busy = 0, args.processes
    result: dict[str, object] = {}
    for way in WAYS:
        kept = {name: list(zip(taken[way, busy][name], taken[way, quiet][name], strict=True)) for name in asked}
        result[way] = {
            "quiet": spread([one for speeds in taken[way, quiet].values() for one in speeds]),
            "busy": spread([one for speeds in taken[way, busy].values() for one in speeds]),
            "kept": paired_ratio(kept),
        }
    first, second = (taken[way, quiet] for way in WAYS)
    pairs = {name: list(zip(first[name], second[name], strict=True)) for name in asked}
    return {"tokens_per_second": result, "quiet, giving way over all threads": paired_ratio(pairs)}


def starting(args: argparse.Namespace) -> dict[str, object]:
    """Seconds until a server is ready."""
    taken: dict[int, list[float]] = {0: [], args.processes: []}
    for _ in range(args.starts):
        for count, seconds in taken.items():
            with others(count):
                begun = time.perf_counter()
                with server([args.target, *(("--draft", args.draft) if args.draft else ())]):
                    seconds.append(time.perf_counter() - begun)
    return {name: spread(seconds) for name, seconds in zip(("quiet", "busy"), taken.values(), strict=True) if seconds}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.busy", description="A machine that does something else too.")
    add_arguments(parser)
    parser.add_argument("--mode", type=mode_of, default="none", help="way of decoding (none)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that want a core (as many as cores)")
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--starts", type=int, default=2, help="of a server, quiet and busy each")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: at least one must be there to make the machine busy")
    return args


def main() -> None:
    args = arguments()
    options = Options.of(args)
    engine, encode = build(args.mode, options), prompts.Encoder(options.tokenizer)
    asked = {prompt.name: encode(prompt) for prompt in prompts.load(None, args.limit)}
    decoded = decoding(engine, asked, args)
    speeds = decoded["tokens_per_second"]
    assert isinstance(speeds, dict)
    record.table(
        f"{args.mode}, {args.processes} processes beside, {engine.info.dtype}, {threads.wanted()} threads",
        ["threads", *next(iter(speeds.values()))],
        [[way, *row.values()] for way, row in speeds.items()],
    )
    started = starting(args)
    print("seconds until ready:", ", ".join(f"{name} {seconds}" for name, seconds in started.items()))
    what = {"mode": args.mode, "processes": args.processes, "prompts": len(asked), "rounds": args.rounds}
    results = {**record.models(engine, args.target, args.draft), **what, **decoded, "seconds until ready": started}
    record.finish("busy", results, not args.no_save)


if __name__ == "__main__":
    main()
