"""Two targets in turn on a machine that holds one: ``python -m bench.switches --switches 50``.

Clients ask one model and then the other without a pause, streamed and whole in turn, while one server loads and unloads
them (``max_loaded_models = 1``). No request may be lost, and what server and engine hold may not grow with the
switches. Exit status 1 if either did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench import record
from bench.http import running
from foresay.server.settings.resolved import BUNDLED

NAMES = ("first", "second")
TOKENS = 8
#: Switches after which everything has been made that is made once.
WARM = 4
#: Megabytes and open files by which the last half of the switches may lie above the first.
MOST_GROWTH, MOST_FILES = 2.0, 2


@dataclass
class Outcome:
    """switches: loads so far. answered: requests by model; lost: what became of the others. server_mb, files: of the
    server after each switch; all_mb: with its engine. longest_wait: of a request, in seconds."""

    switches: int = 0
    answered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    lost: list[str] = field(default_factory=list)
    server_mb: list[float] = field(default_factory=list)
    all_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    longest_wait: float = 0.0

    @property
    def growth(self) -> float:
        """Megabytes of the server by which the second half of the switches lies above the first."""
        return _rise(self.server_mb[WARM:])

    @property
    def more_files(self) -> float:
        """The same of its open files."""
        return _rise(self.files[WARM:])


def _rise(values: list[Any]) -> float:
    half = len(values) // 2
    return float(median(values[half:]) - median(values[:half])) if half else 0.0


def settings(folder: Path, targets: tuple[str, str]) -> Path:
    """A settings file with two targets, of which one is loaded at a time."""
    file = folder / "foresay.toml"
    engine = '[engine]\ndraft = "none"\nmax_model_len = 256\nmax_seqs = 2\nthreads = 1\n'
    models = "".join(f'[models.{name}]\ntarget = "{one}"\n' for name, one in zip(NAMES, targets, strict=True))
    file.write_text(f"{engine}[server]\nmax_loaded_models = 1\n{models}")
    return file


async def switch(process: int, url: str, switches: int, clients: int) -> Outcome:
    """Ask until the models were switched so often. process: the server's. clients: an even number of them."""
    outcome, over = Outcome(), asyncio.Event()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=300)) as session:
        asking = [asyncio.create_task(_client(session, outcome, over, number)) for number in range(clients)]
        try:
            while outcome.switches < switches:
                await asyncio.sleep(0.1)
                await _look(session, process, outcome)
        finally:
            over.set()
            await asyncio.gather(*asking)
    return outcome


async def _client(session: aiohttp.ClientSession, outcome: Outcome, over: asyncio.Event, number: int) -> None:
    """One that asks one model and then the other; half of them begin with each."""
    clock, turn = asyncio.get_running_loop().time, number
    while not over.is_set():
        name, stream, began = NAMES[turn % 2], turn % 4 < 2, clock()
        body = {"model": name, "prompt": "ab", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
        try:
            async with session.post("/v1/completions", json=body) as response:
                text = await response.text()
            whole = text.rstrip().endswith("[DONE]") if stream else f'"completion_tokens":{TOKENS}' in text
            if response.status == 200 and whole and '"error"' not in text:
                outcome.answered[name] += 1
            else:
                outcome.lost.append(f"{name}: {response.status} {text[-500:]}")
        except aiohttp.ClientError as error:
            outcome.lost.append(f"{name}: {error!r}")
        outcome.longest_wait = max(outcome.longest_wait, clock() - began)
        turn += 1
        await asyncio.sleep(0.05 * (number + 1))


async def _look(session: aiohttp.ClientSession, process: int, outcome: Outcome) -> None:
    """Note what is held, if a model was loaded since the last time."""
    async with session.get("/health") as response:
        health: dict[str, Any] = await response.json()
    if health["engine_starts"] == outcome.switches or "ok" not in health["models"].values():
        return
    outcome.switches = health["engine_starts"]
    outcome.server_mb.append(_megabytes(process))
    outcome.all_mb.append(outcome.server_mb[-1] + sum(map(_megabytes, _children(process))))
    outcome.files.append(len(os.listdir(f"/proc/{process}/fd")))


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _megabytes(process: int) -> float:
    """What a process holds alone, without the files that it maps; 0 if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Anonymous:")[1].split()[0]) / 1000
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    bundled = (str(BUNDLED / "target"), str(BUNDLED / "draft"))
    parser.add_argument("--targets", nargs=2, default=bundled, metavar="TARGET")
    parser.add_argument("--switches", type=int, default=50)
    parser.add_argument("--clients", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = settings(Path(folder), tuple(args.targets))
        with running(["--config", str(file), "--no-log-stats"]) as (process, port):
            began = time.monotonic()
            outcome = asyncio.run(switch(process.pid, f"http://127.0.0.1:{port}", args.switches, args.clients))
            seconds = time.monotonic() - began
    _tell(outcome, seconds)
    return 0 if not outcome.lost and outcome.growth < MOST_GROWTH and outcome.more_files <= MOST_FILES else 1


def _tell(outcome: Outcome, seconds: float) -> None:
    rows = [
        ("switches", outcome.switches),
        ("seconds for each", seconds / max(outcome.switches, 1)),
        ("requests answered", sum(outcome.answered.values())),
        ("requests lost", len(outcome.lost)),
        ("longest wait, s", outcome.longest_wait),
        ("server, MB: first and last", f"{outcome.server_mb[0]:.1f} {outcome.server_mb[-1]:.1f}"),
        ("server, MB: later half above earlier", outcome.growth),
        ("with engine, MB: most", max(outcome.all_mb)),
    ]
    record.table("Switching between two targets", ("", ""), rows)
    record.finish("switches", asdict(outcome) | {"seconds": seconds, "growth_mb": outcome.growth})


if __name__ == "__main__":
    sys.exit(main())
