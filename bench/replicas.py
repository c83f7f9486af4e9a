"""Replicas on a real Ray, killed, scaled and updated during streams: is anything lost, does any text change?

    python -m bench replicas --kills 20
    python -m bench replicas --autoscale

Two front doors share the replicas of the bundled pair. Every answer is compared with the one from before any
disturbance. Needs the extra ``foresay[ray]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.record import finish
from bench.serving import running

ADMIN = "an admin key of the bench"
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 60}}}
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    LONG | {"temperature": 0.0, "seed": 0, "repetition_penalty": 1.2},
    LONG | {"temperature": 0.7, "seed": 1, "logprobs": 2, "max_tokens": 300},
    LONG | {"temperature": 1.0, "seed": 2, "stream": True},
    LONG | {"temperature": 1.0, "seed": 3, "n": 3, "presence_penalty": 0.5, "max_tokens": 250},
    LONG | {"temperature": 1.0, "seed": 4, "stream": True, "stop": ["zebra", "quietly"]},
    {"prompt": "The list:", "seed": 5, "max_tokens": 400, "stream": True}
    | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]
PATIENCE = 300.0
#: Ray takes ten minutes to remove a replica.
SCALING_PATIENCE = 1200.0
#: Fields that differ between two answers to one request.
_ITS_OWN = ("id", "created", "metrics", "system_fingerprint")


async def answered(client: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    """The answer to a request, without fields of its own."""
    async with client.post("/v1/completions", json=body) as response:
        if response.status != 200:
            return f"{response.status}: {await response.text()}"
        if not body.get("stream"):
            result = await response.json()
            return {name: value for name, value in result.items() if name not in _ITS_OWN}
        events = [line[6:] async for line in response.content if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    errors = [event.decode() for event in events if b'"error"' in event]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"] if choices else None, errors


class Storm:
    """Streams through front doors that continue all the time. expected: by request. clients: their sessions."""

    def __init__(self, clients: list[aiohttp.ClientSession], expected: list[Any], seed: int) -> None:
        self.clients, self.expected = clients, expected
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._random = random.Random(seed)

    @asynccontextmanager
    async def blowing(self, streams: int) -> AsyncIterator[None]:
        """While the context lasts; waits for those that run at its end."""
        over = asyncio.Event()
        tasks = [asyncio.create_task(self._stream(over)) for _ in range(streams)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def _stream(self, over: asyncio.Event) -> None:
        while not over.is_set():
            which = self._random.randrange(len(REQUESTS))
            answer = await answered(self._random.choice(self.clients), REQUESTS[which])
            if isinstance(answer, str) and answer.startswith("503"):  # nothing was begun: there is no replica yet
                self.counts["refused"] += 1
                await asyncio.sleep(0.2)
                continue
            self.counts["answers"] += 1
            if answer != self.expected[which]:
                self.wrong.append((which, answer))

    async def until_replicas(self, count: int, patience: float = PATIENCE) -> float:
        """Wait until every front door has so many; the seconds that took."""
        begun = time.monotonic()
        async with asyncio.timeout(patience):
            for client in self.clients:
                while len(await replicas(client)) != count:
                    await asyncio.sleep(0.1)
        return time.monotonic() - begun


async def replicas(client: aiohttp.ClientSession) -> list[str]:
    """The names of a front door's replicas."""
    async with client.get("/load") as response:
        return [one["name"] for one in (await response.json()).get("replicas", [])]


def processes(name: str) -> list[int]:
    """The processes of this Ray whose names begin so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name.encode() in path.read_bytes() and _is_ours(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _is_ours(process: int) -> bool:
    while process > 1 and process != os.getpid():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process == os.getpid()


async def kill(storm: Storm, what: str, number: int, count: int) -> float:
    """Kill a replica or an engine; the seconds until all are back."""
    victim = storm._random.choice(processes(what))
    begun, before = time.monotonic(), await replicas(storm.clients[0])
    os.kill(victim, number)
    while await replicas(storm.clients[0]) == before and time.monotonic() < begun + 5.0:
        await asyncio.sleep(0.02)
    await storm.until_replicas(count)
    return time.monotonic() - begun


@contextmanager
def servers(address: str, count: int, flags: list[str]) -> Any:
    """Ports of servers that share one deployment."""
    common = ["--ray-address", address, "--admin-key", ADMIN.replace(" ", "-"), *flags]
    with ExitStack() as stack:
        yield [stack.enter_context(running(common, PATIENCE))[1] for _ in range(count)]


async def disturb(storm: Storm, scale: Callable[[int, int], Awaitable[None]], kills: int) -> dict[str, Any]:
    """Everything that Ray does to replicas, one after the other."""
    seconds: list[float] = []
    await scale(2, 1)
    await storm.until_replicas(2)
    for number in range(kills):
        what = ("ray::ServeReplica", "foresay.server.host.process")[number % 4 == 3]  # mostly the whole replica
        seconds.append(await kill(storm, what, signal.SIGKILL, 2))
        print(f"kill {number + 1} of {kills}: back after {seconds[-1]:.1f} s; {dict(storm.counts)}", file=sys.stderr)
    begun = time.monotonic()
    headers = {"Authorization": f"Bearer {ADMIN.replace(' ', '-')}"}
    async with storm.clients[0].post(
        "/admin/reload", json={"settings": {"draft": "ngram"}}, headers=headers
    ) as response:
        reloaded = await response.json()
    await storm.until_replicas(2)
    update = time.monotonic() - begun
    await scale(1, 2)
    await storm.until_replicas(1)
    return {"back_seconds": sorted(seconds), "update": reloaded, "update_seconds": update}


async def autoscaled(storm: Storm, streams: int) -> dict[str, Any]:
    """What Ray does to one replica by itself, with many streams and then one."""
    async with storm.blowing(streams):
        up = await storm.until_replicas(2)
    async with storm.blowing(1):
        return {"up_seconds": up, "down_seconds": await storm.until_replicas(1, SCALING_PATIENCE)}


async def storm(ports: list[int], scale: Callable[[int, int], Awaitable[None]], args: Namespace) -> Any:
    """The record of one run."""
    timeout = aiohttp.ClientTimeout(total=None)
    clients = [aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) for port in ports]
    try:
        expected = [await answered(clients[0], body) for body in REQUESTS]
        blown = Storm(clients, expected, args.seed)
        if args.autoscale:
            result = await autoscaled(blown, args.streams)
        else:
            async with blown.blowing(args.streams):
                result = await disturb(blown, scale, args.kills)
        resumed = []
        for client in clients:
            async with client.get("/dashboard/state") as response:
                resumed.append((await response.json())["snapshot"]["server"]["resumed"])
        return result | dict(blown.counts) | {"resumed": resumed, "wrong": blown.wrong, "expected": len(expected)}
    finally:
        await asyncio.gather(*[client.close() for client in clients])


def run(args: Namespace) -> dict[str, Any]:
    """With its own Ray."""
    import ray
    from ray import serve

    from foresay.server.host.replicas.cluster import APPLICATION, ENVIRONMENT, application
    from foresay.server.settings.config import ServeConfig

    os.environ.update(ENVIRONMENT)
    config = ServeConfig(threads=1, engine_timeout=PATIENCE, max_resumes=1000)

    async def scale(count: int, deployed: int) -> None:
        settings = config if deployed == 1 else ServeConfig(**{**_fields(config), "draft": "ngram"})
        made = application(settings, str(count), None, deployed)
        await asyncio.to_thread(serve.run, made, name=APPLICATION, route_prefix=None)

    own = {"address": "local", "num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}
    ray.init(**own, log_to_driver=False)
    try:
        flags = ["--threads", "1", "--engine-timeout", f"{PATIENCE:g}", "--max-resumes", "1000", "--no-log-stats"]
        flags += ["--replicas", "1-2", "--max-seqs", "4"] if args.autoscale else ["--replicas", "1"]
        with servers(ray.get_runtime_context().gcs_address, args.clients, flags) as ports:
            result: dict[str, Any] = asyncio.run(storm(ports, scale, args))
            return result | {"ray": ray.__version__}
    finally:
        ray.shutdown()


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--autoscale", action="store_true", help="instead: what Ray does by itself under load")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--doors", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def main(args: Namespace) -> int:
    """Whether anything was lost."""
    results = run(args)
    finish("replicas", results, save=not args.no_save)
    return 1 if results["wrong"] else 0
