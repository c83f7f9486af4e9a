"""The pause of a stream whose engine is killed: ``python -m bench.pause --kills 9``. Starts a server of its own.

Each stream is written twice with one seed, the second time with the engine killed at its eighth event; the pause is the
longest wait from the signal on. Exit status 1 if a text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import record
from bench.soak.served import Served, started

AT = 8
ASKED = {"prompt": "The meaning of life is", "max_tokens": 300, "temperature": 1.0, "stream": True, "ignore_eos": True}


async def told(served: Served, seed: int, kill: bool) -> tuple[str, float]:
    """The text, and the longest wait for an event from the signal on; 0 without one."""
    text, last, pause, events = "", 0.0, 0.0, 0
    async with served.client.post("/v1/completions", json=ASKED | {"seed": seed}) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            events += 1
            if last:  # what was sent before the signal may be read behind it: that is no pause
                pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
            if kill and events == AT:
                os.kill(served.engine_id or 0, signal.SIGKILL)
                last = time.perf_counter()
    return text, pause


async def pauses(served: Served, kills: int) -> tuple[list[float], int]:
    """Of streams that were hit, and how many of these had another text."""
    seconds, wrong = [], 0
    for seed in range(kills):
        right, _ = await told(served, seed, kill=False)
        await asyncio.sleep(0.5)  # a spare is there again
        text, pause = await told(served, seed, kill=True)
        seconds.append(pause)
        wrong += text != right
    return seconds, wrong


async def main() -> int:
    """Measure, print and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started(["--no-log-stats"], Path(folder) / "log") as (process, port):
        async with Served(process, port, Path(folder) / "log") as served:
            seconds, wrong = await pauses(served, args.kills)
    ordered = sorted(seconds)
    rows = [
        ("median", ordered[len(ordered) // 2]),
        ("least", ordered[0]),
        ("most", ordered[-1]),
        ("other texts", wrong),
    ]
    record.table("From SIGKILL to the next token, s", ("", ""), rows)
    record.finish("pause", {"seconds": ordered, "wrong": wrong}, save=not args.no_save)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
