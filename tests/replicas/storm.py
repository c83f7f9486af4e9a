"""Replicas on a Ray of its own, killed, scaled and updated under streams: ``python -m tests.replicas.storm``.

Two front doors share the replicas of the bundled pair. Every answer is compared with the one from before any
disturbance; the last line is the record, in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from bench.serving import FORESAY, started

ADMIN, KILLS, STREAMS, PATIENCE = "an-admin-key-of-the-test", 2, 2, 300.0
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
#: Fields that differ between two answers to one request.
_ITS_OWN = ("id", "created", "metrics", "system_fingerprint", "timings")


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

    def __init__(self, clients: list[aiohttp.ClientSession], expected: list[Any]) -> None:
        self.clients, self.expected = clients, expected
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.random = random.Random(0)

    @asynccontextmanager
    async def blowing(self) -> AsyncIterator[None]:
        """While the context lasts; waits for those that run at its end."""
        over = asyncio.Event()
        tasks = [asyncio.create_task(self._stream(over)) for _ in range(STREAMS)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def _stream(self, over: asyncio.Event) -> None:
        while not over.is_set():
            which = self.random.randrange(len(REQUESTS))
            answer = await answered(self.random.choice(self.clients), REQUESTS[which])
            if isinstance(answer, str) and answer.startswith("503"):  # nothing was begun: there is no replica yet
                await asyncio.sleep(0.2)
                continue
            self.counts["answers"] += 1
            if answer != self.expected[which]:
                self.wrong.append((which, answer))

    async def until_replicas(self, count: int) -> None:
        """Wait until every front door has so many."""
        async with asyncio.timeout(PATIENCE):
            for client in self.clients:
                while len(await replicas(client)) != count:
                    await asyncio.sleep(0.1)

    async def kill(self, what: str, count: int) -> None:
        """Kill a replica or an engine, and wait until all are back."""
        before, noticed = await replicas(self.clients[0]), time.monotonic() + 5.0
        os.kill(self.random.choice(processes(what)), signal.SIGKILL)
        while await replicas(self.clients[0]) == before and time.monotonic() < noticed:
            await asyncio.sleep(0.02)
        await self.until_replicas(count)


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


async def disturb(storm: Storm, scale: Callable[[int, int], Awaitable[None]]) -> dict[str, Any]:
    """Everything that Ray does to replicas, one after the other; the answer to the update."""
    await scale(2, 1)
    await storm.until_replicas(2)
    for number in range(KILLS):
        await storm.kill(("ray::ServeReplica", "foresay.server.engine_process.process")[number % 2], 2)
    body, headers = {"settings": {"draft": "ngram"}}, {"Authorization": f"Bearer {ADMIN}"}
    async with storm.clients[0].post("/admin/reload", json=body, headers=headers) as response:
        update: dict[str, Any] = await response.json()
    await storm.until_replicas(2)
    await scale(1, 2)
    await storm.until_replicas(1)
    return update


async def record(ports: list[int], scale: Callable[[int, int], Awaitable[None]]) -> dict[str, Any]:
    """The record of one run."""
    timeout = aiohttp.ClientTimeout(total=None)
    clients = [aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) for port in ports]
    try:
        storm = Storm(clients, [await answered(clients[0], body) for body in REQUESTS])
        async with storm.blowing():
            update = await disturb(storm, scale)
        return {"update": update, **storm.counts, "wrong": storm.wrong}
    finally:
        await asyncio.gather(*[client.close() for client in clients])


def main() -> None:
    """With its own Ray."""
    import ray
    from ray import serve

    from foresay.server.replicas.cluster import APPLICATION, ENVIRONMENT, application
    from foresay.server.settings.config import ServeConfig

    os.environ.update(ENVIRONMENT)
    config = ServeConfig(threads=1, engine_timeout=PATIENCE, max_resumes=1000)

    async def scale(count: int, deployed: int) -> None:
        made = application(config if deployed == 1 else replace(config, draft="ngram"), str(count), None, deployed)
        await asyncio.to_thread(serve.run, made, name=APPLICATION, route_prefix=None)

    ray.init("local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    try:
        flags = ["--ray-address", ray.get_runtime_context().gcs_address, "--admin-key", ADMIN, "--replicas", "1"]
        flags += ["--threads", "1", "--engine-timeout", f"{PATIENCE:g}", "--max-resumes", "1000", "--no-log-stats"]
        with ExitStack() as stack:
            ports = [stack.enter_context(started([*FORESAY, *flags]))[1] for _ in range(2)]
            print(json.dumps(asyncio.run(record(ports, scale))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
