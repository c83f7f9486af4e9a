"""What KV on disk saves, and what it costs other requests: ``python -m bench restart --target FILE --other DIR``.

One long prompt is answered with nothing kept; again, from memory; after a swap to the other model and back; after
SIGTERM and a start; after SIGKILL and a start, when there was time to write. Shares are of the first token's cold time.
Each round does it with KV on disk and without. Last, after another restart, a stream runs while the prompt is sent
twice: read back from disk, and found in memory. How much longer the stream's longest gap is in the first case is the
delay by reading; a single step of the rest of the prompt is in both.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench import record
from bench.agents import passages
from bench.serving import FORESAY, Answer, exchange, started

#: Tokens of the prompt that tests whether a model is loaded; and seconds in which all is written.
SHORT, IDLE = 16, 4.0
#: Requests a completion of this body; is called back with the number of each event.
Send = Callable[..., Answer]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--target", default="bundled", help="a GGUF file, a directory or a hub id")
    parser.add_argument("--other", default="bundled", help="the model that it is swapped for")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tokens", type=int, default=7800, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=1)


def main(args: Namespace) -> None:
    ids, found = passages(args), defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    for turn in range(args.rounds):
        for disk in ("off", "8GiB"):
            prompt = ids[turn * args.tokens :][: args.tokens]
            with tempfile.TemporaryDirectory() as folder:
                for name, seconds in life(args, prompt, disk, Path(folder)):
                    found[name][disk].append(seconds)
                    print(f"{name:24} disk {disk:5} {seconds:8.4f}", flush=True)
    middle = {name: {disk: median(each) for disk, each in by.items()} for name, by in found.items()}
    rows = [[name, *(by.get(disk, "") for disk in ("off", "8GiB"))] for name, by in middle.items()]
    record.table("seconds", ["", "no disk", "disk"], rows)
    record.finish("restart", {"target": Path(args.target).name, "seconds": middle}, not args.no_save)


def life(args: Namespace, prompt: Sequence[int], disk: str, folder: Path) -> Iterator[tuple[str, float]]:
    """The measurements, and their seconds."""
    server, fields = partial(serving, args, disk, folder), {"prompt": prompt, "max_tokens": 24}
    with server() as (process, send):
        yield "first token, cold", (cold := send(fields)).first
        yield "in memory", same(send(fields), cold)
        yield "swap", send({"prompt": list(range(5, 5 + SHORT)), "model": "other"}).first
        yield "and back", send({"prompt": prompt[:SHORT]}).first
        yield "after both", same(send(fields), cold)
        if disk == "off":
            return
        process.send_signal(signal.SIGTERM)
        process.wait()
    with server() as (process, send):
        yield "after SIGTERM", same(send(fields), cold)
        send({"prompt": (other := [*reversed(prompt)]), "max_tokens": 24})
        yield "short, while written", send({"prompt": prompt[-SHORT:]}).first
        time.sleep(IDLE)
        yield "short", send({"prompt": prompt[-2 * SHORT : -SHORT]}).first
        process.kill()
        process.wait()
    with server() as (process, send):
        yield "after SIGKILL", same(send(fields), cold)
        yield "written when idle", send({"prompt": other, "max_tokens": 24}).first
        process.kill()
        process.wait()
    with server() as (_, send):
        for name in ("longest gap, read", "longest gap, in memory"):
            yield name, gap(send, fields, prompt[:SHORT])


def same(answer: Answer, cold: Answer) -> float:
    """Its first token's time; raises unless the answers are the same."""
    assert answer.text == cold.text, "texts differ"
    return answer.first


def gap(send: Send, fields: Mapping[str, object], short: Sequence[int]) -> float:
    """A stream's longest time without a token, from when another prompt is sent to that one's first token."""
    on_token: list[float] = []
    with ThreadPoolExecutor() as threads:
        body = {"prompt": short, "max_tokens": 600, "speculation": {"off": True}}
        stream = threads.submit(send, body, lambda event: on_token.append(time.perf_counter()))
        while len(on_token) < 32 and not stream.done():
            time.sleep(0.01)
        begun = time.perf_counter()
        until = begun + send(fields).first
        stream.result()
    return max(after - before for before, after in pairwise(on_token) if begun < after and before < until)


@contextmanager
def serving(args: Namespace, disk: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Send]]:
    """A warm server of both models, one at a time; and a client of it."""
    models = "".join(
        f'[models.{name}]\ntarget = "{each}"\n' for name, each in (("one", args.target), ("other", args.other))
    )
    (file := folder / "foresay.toml").write_text(
        f'[engine]\ndraft = "{args.draft}"\nkv_disk = "{disk}"\n[server]\nmax_loaded_models = 1\n{models}'
    )
    variables = {"XDG_CACHE_HOME": str(folder), "FORESAY_KV_DISK": disk}
    with started([*FORESAY, "--config", str(file)], "/ready", errors=subprocess.DEVNULL, environment=variables) as (
        process,
        port,
    ):

        def send(body: Mapping[str, Any], on_token: Callable[[int], None] | None = None) -> Answer:
            fixed = {"model": "one", "temperature": 0, "ignore_eos": True, "stream": True}
            return exchange(port, {**fixed, **body}, on_token)

        send({"prompt": list(range(5, 105)), "max_tokens": 24})
        yield process, send
