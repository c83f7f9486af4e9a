"""Whether sockets that stop reading slow a stream beside them: ``python -m bench.sockets``. Starts a server of its own.

One WebSocket reads a response as it comes; the gaps between its deltas are measured in turns

- alone,
- beside ``--sockets`` others that have stopped reading: what they asked for was made and waits, stuck, in the server,
- beside ``--busy`` others that read what they ask for, again and again,
- beside as many that ask for the same and have stopped reading.

The second figure over the first is the price of deaf sockets; the fourth over the third the price of deafness while
the engine works for them, since company in the batch costs time by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import struct
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

from bench import record
from bench.http import server
from bench.stats import percentile, spread

LAST = ("response.completed", "response.incomplete", "response.failed", "error")
#: The error about a model of this name is more than the kernel takes for a client that reads nothing.
LARGE = "x" * 3_000_000


class Connection:
    """A WebSocket with nothing on top, so that the client costs as little as possible."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def create(self, **fields: Any) -> None:
        """Ask for a response."""
        data = json.dumps({"type": "response.create", "store": False, "ignore_eos": True} | fields).encode()
        size = struct.pack("!BH", 254, len(data)) if len(data) < 1 << 16 else struct.pack("!BQ", 255, len(data))
        self.writer.write(b"\x81" + size + bytes(4) + data)  # the mask of zeros leaves the data as it is
        await self.writer.drain()

    async def event(self) -> tuple[float, dict[str, Any]]:
        """The next event, and when it came."""
        while True:
            first, length = await self.reader.readexactly(2)
            if length > 125:
                length = int.from_bytes(await self.reader.readexactly(2 if length == 126 else 8), "big")
            data = await self.reader.readexactly(length)
            if first & 15 == 1:
                return time.perf_counter(), json.loads(data)

    async def last(self) -> None:
        """Read to the end of a response."""
        while (await self.event())[1]["type"] not in LAST:
            pass


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """One connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    if b" 101 " not in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]:
        raise ConnectionError("the handshake was refused")
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def gaps(port: int, tokens: int) -> list[float]:
    """Milliseconds between the deltas of one stream."""
    async with connected(port) as one:
        await one.create(input="Tell me a story.", max_output_tokens=tokens, seed=1, temperature=0)
        arrivals = []
        while True:
            when, event = await one.event()
            if event["type"] == "response.output_text.delta":
                arrivals.append(when)
            elif event["type"] in LAST:
                return [1e3 * (b - a) for a, b in pairwise(arrivals)]


@asynccontextmanager
async def stuck(port: int, sockets: int) -> AsyncIterator[None]:
    """Sockets that read nothing, whose responses are over and wait."""
    async with several(port, sockets) as those:
        for one in those:
            await one.create(input="Hi", model=LARGE)
            await one.create(input="Hi", max_output_tokens=1)
        await settled(port)
        yield


async def settled(port: int) -> None:
    """Wait until nothing runs for a second."""
    quiet = 0
    while quiet < 10:
        await asyncio.sleep(0.1)
        reply = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/health")
        quiet = 0 if json.load(reply)["running"] else quiet + 1


@asynccontextmanager
async def busy(port: int, sockets: int, reading: bool) -> AsyncIterator[None]:
    """Sockets that keep the engine busy, whether they read or not."""
    async with several(port, sockets) as those:
        tasks = [asyncio.create_task(keep_asking(one, number, reading)) for number, one in enumerate(those)]
        await asyncio.sleep(1.0)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_asking(one: Connection, number: int, reading: bool) -> None:
    """One long response after the other; a deaf client asks for them ahead."""
    if not reading:
        await one.create(input="Hi", model=LARGE)
    for _ in range(40):
        await one.create(input="Tell me a story.", max_output_tokens=400, seed=number)
        if reading:
            await one.last()
    await asyncio.sleep(3600)


@asynccontextmanager
async def several(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Several connections."""
    opened = [connected(port) for _ in range(count)]
    try:
        yield [await one.__aenter__() for one in opened]
    finally:
        await asyncio.gather(*[one.__aexit__(None, None, None) for one in opened], return_exceptions=True)


async def measure(port: int, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The gaps of every round by condition, in random order."""
    order = random.Random(args.seed)
    found: dict[str, list[list[float]]] = {"alone": [], "beside deaf": [], "beside readers": [], "beside busy deaf": []}
    await gaps(port, args.max_tokens)
    for _ in range(args.rounds):
        for name in order.sample(list(found), len(found)):
            match name:
                case "alone":
                    found[name].append(await gaps(port, args.max_tokens))
                case "beside deaf":
                    async with stuck(port, args.sockets):
                        found[name].append(await gaps(port, args.max_tokens))
                case _:
                    async with busy(port, args.busy, reading=name == "beside readers"):
                        found[name].append(await gaps(port, args.max_tokens))
            await settled(port)
    return found


def summarise(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians over the rounds, and the ratios of the p99."""
    p50 = {name: spread([percentile(one, 50) for one in rounds]) for name, rounds in found.items()}
    p99 = {name: spread([percentile(one, 99) for one in rounds]) for name, rounds in found.items()}
    return {
        **{f"gap_ms_p50 {name}": value for name, value in p50.items()},
        **{f"gap_ms_p99 {name}": value for name, value in p99.items()},
        "p99_deaf_over_alone": p99["beside deaf"].median / p99["alone"].median,
        "p99_busy_deaf_over_readers": p99["beside busy deaf"].median / p99["beside readers"].median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sockets", description="A stream beside deaf sockets.")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--sockets", type=int, default=100)
    parser.add_argument("--busy", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    flags = [args.target, "--threads", str(args.threads), "--max-seqs", str(args.busy + 1)]
    with server(flags) as port:
        summary = summarise(asyncio.run(measure(port, args)))
    record.table("a stream beside deaf sockets", ["figure", "value"], [[k, v] for k, v in summary.items()])
    shape = {"sockets": args.sockets, "busy": args.busy, "rounds": args.rounds, "max_tokens": args.max_tokens}
    record.finish(
        "sockets", {"target": args.target, **shape, "server_threads": args.threads, **summary}, not args.no_save
    )


if __name__ == "__main__":
    main()
