"""What replicas cost a stream: ``python -m bench.carried [--beside TREE]``.

The same requests in turns to a server without replicas, to one with one replica on Ray Serve, and (``--beside``) to a
server of another tree, such as one before a change: time to the first event, and between two events. Needs the extra
``foresay[ray]``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.http import free_port, wait_until_ready
from bench.record import finish, table
from bench.stats import percentile

FLAGS = ["--threads", "1", "--no-log-stats", "--draft", "none"]


@contextmanager
def served(tree: Path, *flags: str) -> Iterator[int]:
    """The port of a server of a tree's code."""
    port = free_port()
    command = [sys.executable, "-m", "foresay.server.cli.main", "serve", "--port", str(port), *FLAGS, *flags]
    process = subprocess.Popen(command, cwd=tree, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(tree)})
    try:
        wait_until_ready(process, port, 300.0)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def streamed(port: int, seed: int, tokens: int) -> tuple[float, list[float]]:
    """Milliseconds to the first event, and between two."""
    body = {"prompt": f"Story {seed}:", "max_tokens": tokens, "seed": seed, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun, times = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(1e3 * (time.perf_counter() - begun))
    return times[0], [after - before for before, after in itertools.pairwise(times)]


def told(firsts: list[float], gaps: list[float]) -> dict[str, float]:
    """Middle and tail of both."""
    both = {"ttft": firsts, "itl": gaps}
    return {f"{name}_p{share}": percentile(values, share) for name, values in both.items() for share in (50, 99)}


def main() -> None:
    """Measure in turns, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another tree of the project's code")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    here, drawn = Path(__file__).parent.parent, random.Random(0)
    lanes: dict[str, tuple[list[float], list[float]]] = {}
    with ExitStack() as stack:
        ports = {"one process": stack.enter_context(served(here))}
        ports["one replica"] = stack.enter_context(served(here, "--replicas", "1"))
        if args.beside is not None:
            ports["beside"] = stack.enter_context(served(args.beside.resolve()))
        for seed in range(-3, args.rounds):  # the first ones warm up
            for name in drawn.sample(list(ports), len(ports)):
                first, gaps = streamed(ports[name], seed, args.tokens)
                if seed >= 0:
                    firsts, all_gaps = lanes.setdefault(name, ([], []))
                    firsts.append(first)
                    all_gaps += gaps
    results: dict[str, Any] = {name: told(*lane) for name, lane in lanes.items()}
    table("ms", ["", *results["one process"]], [[name, *row.values()] for name, row in results.items()])
    finish("carried", {"rounds": args.rounds, "tokens": args.tokens, "lanes": results}, save=not args.no_save)


if __name__ == "__main__":
    main()
