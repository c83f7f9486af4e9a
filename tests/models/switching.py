"""Two targets in turn on a machine that holds one: clients ask one model and then the other without a pause, streamed
and whole in turn, while one server loads and unloads them (``max_loaded_models = 1``)."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("first", "second")
TOKENS = 8
#: Open files that may be more after some switches than after the first ones.
MOST_FILES = 2


@dataclass
class Outcome:
    """switches: loads so far. answered: requests by model; lost: what became of the others. server_mb, files: what the
    server holds and has open after each switch."""

    switches: int = 0
    answered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    lost: list[str] = field(default_factory=list)
    server_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


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
    turn = number
    while not over.is_set():
        name, stream = NAMES[turn % 2], turn % 4 < 2
        body = {"model": name, "prompt": "ab", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
        try:
            async with session.post("/v1/completions", json=body) as response:
                text = await response.text()
            whole = text.rstrip().endswith("[DONE]") if stream else f'"completion_tokens":{TOKENS}' in text
            if response.status == 200 and whole and '"error"' not in text:
                outcome.answered[name] += 1
            else:
                outcome.lost.append(f"{name}: {response.status} {text[-500:]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.lost.append(f"{name}: {error!r}")
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
    outcome.files.append(len(os.listdir(f"/proc/{process}/fd")))


def _megabytes(process: int) -> float:
    """What a process holds alone, without the files that it maps."""
    return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Anonymous:")[1].split()[0]) / 1000
