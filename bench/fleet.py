"""Many replicas, simulated: which should get a request? ``python -m bench fleet --traces DIR``.

Recorded conversations of agents (tau-bench, airline: one system prompt, then turns that grow) are replayed against 1,
4, 16 and 64 simulated replicas, with the serving router (:mod:`foresay.server.host.replicas.router`), to the least
loaded, and at random. A replica steps as an engine does: up to ``SEATS`` sequences next to a chunk of one prompt, pages
found again by their names, the last used ones kept. The time of a step of so many rows was measured; the rest of the
model is below. The recordings have no times: conversations begin at random, at the same rate for each replica at every
size, and a turn follows the answer before after a pause.
"""

from __future__ import annotations

import heapq
import json
import random
import re
from argparse import ArgumentParser, Namespace
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log10
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from bench.record import finish, table
from bench.stats import percentile
from foresay.kvpaging.prefix import digests
from foresay.server.host.replicas.router import Router, Standing

#: The time of a step of so many rows, in ms: the 135M class on two cores (bench/README.md, "counted").
STEP_MS = ((1, 8.0), (2, 8.6), (4, 9.0), (8, 9.9), (16, 14.5), (32, 27.0), (64, 53.0), (128, 106.0))
SEATS, CHUNK, PAGE, PAGES = 4, 64, 16, 2048
#: Rows of a decoding sequence in a step, and tokens that it emits.
ROWS, TOKENS = 4, 2.4
#: Seconds: the mean pause before the next turn, and between two conversations for each replica.
PAUSE, BETWEEN = 8.0, 15.0
WAYS = ("router", "least loaded", "random")


@dataclass(slots=True, eq=False)
class Turn:
    """One request. prompt: its token ids. rest: the turns after it. Times are in seconds."""

    prompt: list[int]
    output: int
    rest: list[tuple[list[int], int]]
    salt: str = ""
    arrived: float = 0.0
    begun: float = 0.0
    first: float = 0.0
    cached: int = 0
    unread: int = 0
    left: float = 0.0
    gaps: list[float] = field(default_factory=list)
    last: float = 0.0


@dataclass(slots=True, eq=False)
class Simulated:
    """One replica: the turns that wait and run, and the pages it holds."""

    waiting: deque[Turn] = field(default_factory=deque)
    running: list[Turn] = field(default_factory=list)
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    stepping: bool = False

    @property
    def standing(self) -> Standing:
        """Its load as reported to a front door."""
        turns = [*self.waiting, *self.running]
        unread = sum(len(turn.prompt) for turn in turns if not turn.first)
        return Standing(len(turns), SEATS, unread, PAGES)

    def admit(self, now: float) -> None:
        """Admit the next turns while there are seats; shared pages are found."""
        while self.waiting and len(self.running) < SEATS:
            turn = self.waiting.popleft()
            names = list(digests(turn.prompt, PAGE, turn.salt))
            known = next((index for index, name in enumerate(names) if name not in self.pages), len(names))
            turn.cached = min(known * PAGE, len(turn.prompt) - 1)
            turn.begun, turn.unread, turn.left = now, len(turn.prompt) - turn.cached, float(turn.output)
            for name in reversed(names):
                self.pages[name] = None
                self.pages.move_to_end(name)
            while len(self.pages) > PAGES:
                self.pages.popitem(last=False)
            self.running.append(turn)

    def step(self, now: float) -> tuple[float, list[Turn]]:
        """Take a step; its end, and the turns that finished in it."""
        reader = next((turn for turn in self.running if turn.unread), None)
        read = 0 if reader is None else min(CHUNK, reader.unread)
        writers = [turn for turn in self.running if not turn.unread]
        over = now + took(read + ROWS * len(writers)) / 1e3
        if reader is not None:
            reader.unread -= read
            if not reader.unread:
                reader.first = reader.last = over
        for turn in writers:
            turn.gaps.append(over - turn.last)
            turn.last, turn.left = over, turn.left - TOKENS
        done = [turn for turn in writers if turn.left <= 0]
        self.running = [turn for turn in self.running if turn not in done]
        return over, done


def took(rows: int) -> float:
    """Milliseconds of a step, interpolated between the measured ones."""
    return float(np.interp(rows, [count for count, _ in STEP_MS], [ms for _, ms in STEP_MS]))


def conversations(traces: Path) -> list[list[tuple[list[int], int]]]:
    """The turns of each recording: the prompt's token ids, and the answer's length. A token is a word or a sign."""
    found = []
    for recording in json.loads((traces / "tau_bench_gpt-4o-airline.json").read_text()):
        said: list[int] = []
        turns = []
        for message in recording["traj"]:
            text = f"{message['role']}: {message.get('content') or ''}{json.dumps(message.get('tool_calls') or '')}"
            tokens = [crc32(part.encode()) & 0xFFFF for part in re.findall(r"\w+|[^\w\s]", text)]
            if message["role"] == "assistant" and said:
                turns.append((list(said), len(tokens)))
            said += tokens
        found.append(turns)
    return found


def begun(known: Sequence[list[tuple[list[int], int]]], count: int, replicas: int, seed: int) -> Iterator[Turn]:
    """First turns of conversations and their arrivals; each has its own user, whose name is in it."""
    drawn, now = random.Random(seed), 0.0
    for number in range(count):
        now += drawn.expovariate(replicas / BETWEEN)
        turns = known[number % len(known)]
        shared = len(turns[0][0]) - 40  # the system prompt; the rest is the user's
        named = [([*prompt[:shared], 1 << 17 | number, *prompt[shared:]], output) for prompt, output in turns]
        yield turn_of(named, now)


def turn_of(turns: list[tuple[list[int], int]], arrived: float) -> Turn:
    """The first of them, followed by the others."""
    (prompt, output), *rest = turns
    return Turn(prompt, output, rest, arrived=arrived)


def simulate(way: str, replicas: int, firsts: Sequence[Turn], seed: int) -> list[Turn]:
    """Every turn, once all are over."""
    fleet = {f"{number:03}": Simulated() for number in range(replicas)}
    router, drawn, ended = Router(PAGE), random.Random(seed), []
    events: list[tuple[float, int, str, Any]] = [(turn.arrived, n, "come", turn) for n, turn in enumerate(firsts)]
    heapq.heapify(events)
    count = len(events)

    def push(at: float, kind: str, what: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, what))

    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "come":
            replica = fleet[chosen(way, fleet, router, what, drawn)]
            replica.waiting.append(what)
        else:
            replica, done = what
            replica.stepping = False
            for turn in done:
                ended.append(turn)
                if turn.rest:
                    at = now + drawn.expovariate(1 / PAUSE)
                    push(at, "come", turn_of(turn.rest, at))
        if not replica.stepping:
            replica.admit(now)
            if replica.running:
                over, done = replica.step(now)
                replica.stepping = True
                push(over, "step", (replica, done))
    return ended


def chosen(way: str, fleet: dict[str, Simulated], router: Router, turn: Turn, drawn: random.Random) -> str:
    """The replica for a turn."""
    if way == "random":
        return drawn.choice(list(fleet))
    standings = {name: replica.standing for name, replica in fleet.items()}
    if way == "least loaded":
        return min(standings, key=lambda name: (standings[name].load, drawn.random()))
    return router.choose(turn.prompt, turn.salt, standings)


def told(turns: Sequence[Turn]) -> dict[str, float]:
    """Clients' latencies, in ms."""
    firsts = [1e3 * (turn.first - turn.arrived) for turn in turns]
    queued = [1e3 * (turn.begun - turn.arrived) for turn in turns]
    gaps = [1e3 * gap for turn in turns for gap in turn.gaps]
    hit = sum(turn.cached for turn in turns) / sum(len(turn.prompt) for turn in turns)
    spread = {"ttft": firsts, "queued": queued, "itl": gaps}
    return {"hit": hit} | {
        f"{name}_p{share}": percentile(values, share) for name, values in spread.items() for share in (50, 99)
    }


COLOURS = {"router": "#0b6e4f", "least loaded": "#c05621", "random": "#718096"}


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of the time to the first token by number of replicas: medians in full lines, p99 in broken ones."""
    counts = sorted({row["replicas"] for row in rows})
    across = {count: 70 + 150 * index for index, count in enumerate(counts)}
    width, drawn = across[counts[-1]] + 130, []
    for power in range(2, 6):
        y = _down(10.0**power)
        drawn.append(
            f'<path d="M60 {y:.0f}H{width - 110}" stroke="#ddd"/><text x="4" y="{y + 4:.0f}">{10**power} ms</text>'
        )
    drawn += [f'<text x="{x - 6}" y="292">{count}</text>' for count, x in across.items()]
    for way in WAYS:
        for share, dash in ((50, ""), (99, ' stroke-dasharray="5 4"')):
            points = [(across[row["replicas"]], _down(row[f"ttft_p{share}"])) for row in rows if row["way"] == way]
            line = " ".join(f"{x},{y:.1f}" for x, y in points)
            drawn.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[way]}" stroke-width="2"{dash}/>')
            x, y = points[-1]
            drawn.append(f'<text x="{x + 8}" y="{y + 4:.0f}" fill="{COLOURS[way]}">{way} p{share}</text>')
    title = '<text x="60" y="14">Simulated: time to first token, by number of replicas</text>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" {style}>{title}{"".join(drawn)}</svg>\n'


def _down(milliseconds: float) -> float:
    """The distance from the upper edge, on a logarithmic scale from 100 ms to 100 s."""
    return 275 - 83 * (log10(milliseconds) - 2)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, required=True, help="directory of recorded texts")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--conversations", type=int, default=12, help="for each replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="where to draw it, as SVG")
    parser.add_argument("--no-save", action="store_true")


def main(args: Namespace) -> None:
    known = conversations(args.traces)
    rows = []
    for replicas in args.replicas:
        for way in WAYS if replicas > 1 else WAYS[:1]:
            firsts = list(begun(known, args.conversations * replicas, replicas, args.seed))
            turns = simulate(way, replicas, firsts, args.seed)
            rows.append({"replicas": replicas, "way": way, "turns": len(turns)} | told(turns))
            print(json.dumps(rows[-1]), flush=True)
    if args.plot is not None:
        args.plot.write_text(plot(rows))
    table("simulated", list(rows[0]), [list(row.values()) for row in rows])
    finish("fleet", {"simulated": True, "rows": rows}, save=not args.no_save)
