"""Servers in processes of their own, Foresay's and others', and a client that streams a completion from any of them."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import IO, Any, Self

COMMAND = (sys.executable, "-m", "foresay.server.cli")
FORESAY = (*COMMAND, "serve")


class ServerFailed(RuntimeError):
    """The server did not start, or answered with an error."""


def free_port() -> int:
    """One that the system gives to nobody who asks for any, as most other servers and all clients do."""
    for port in random.sample(range(10_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


@contextmanager
def started(
    command: Sequence[str],
    path: str = "/ready",
    patience: float = 300.0,
    errors: IO[bytes] | int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and port of any server that takes ``--port``, once ``path`` answers 200; it is stopped afterwards.

    errors: the file of its stderr; None: ours. environment: variables besides ours.
    """
    # The next run is to read what this one reads.
    port, env = free_port(), {"FORESAY_KV_DISK": "off", **os.environ, **(environment or {})}
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=errors, env=env)
    try:
        _wait_until_ready(process, port, patience, path)
        yield process, port
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, patience: float, path: str) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailed(f"the server left with status {process.returncode}: {process.args!r}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ServerFailed(f"the server was not ready after {patience:.0f} s: {process.args!r}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion. arrivals: seconds from the request to each line with an event (one, for an answer that is not
    streamed). first: to the first text; whole: to the event that ends the text; seconds: to the last byte. cached:
    tokens of the prompt that were found."""

    text: str
    tokens: int
    arrivals: list[float]
    first: float
    whole: float
    seconds: float
    cached: int = 0

    @property
    def speed(self) -> float:
        """Tokens after the first, per second since then."""
        return (self.tokens - 1) / (self.whole - self.first)


def exchange(port: int, body: Mapping[str, Any], on_token: Callable[[int], None] | None = None) -> Answer:
    """One completion. Before its end only the time of each event is read, for every kind of server.

    on_token: called with the number of each event as it arrives.
    """
    fields = dict(body) | ({"stream_options": {"include_usage": True}} if body.get("stream") else {})
    with closing(HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        begun, lines = time.perf_counter(), list[tuple[float, bytes]]()
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ServerFailed(response.read().decode(errors="replace"))
        for line in response:
            if line.startswith((b"data: {", b"{")):
                lines.append((time.perf_counter() - begun, line))
                if on_token:
                    on_token(len(lines))
        seconds = time.perf_counter() - begun
    events = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in lines]
    choices = [(at, event["choices"][0]) for at, event in events if event.get("choices")]
    texts = [at for at, choice in choices if choice.get("text")]
    ends = [at for at, choice in choices if choice.get("finish_reason")]
    usage = [event["usage"] for _, event in events if event.get("usage")]
    if not (ends and usage):
        raise ServerFailed(f"the answer ended with {lines[-1:]}")
    text = "".join(choice.get("text") or "" for _, choice in choices)
    arrivals = [at for at, _ in events]
    cached = (usage[-1].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, usage[-1]["completion_tokens"], arrivals, (texts or ends)[0], ends[0], seconds, cached)


@dataclass
class Server:
    """A server that runs while its context lasts. ready: the path that returns whether it is ready. body: the fields of
    its requests besides the prompt and the sampling. port: once it runs."""

    name: str
    command: Sequence[str]
    ready: str
    body: Mapping[str, Any]
    port: int = field(init=False)

    def __enter__(self) -> Self:
        with ExitStack() as running:
            _, self.port = running.enter_context(started(self.command, self.ready, errors=subprocess.DEVNULL))
            self.send([1, 2, 3, 4] * 20, 16, temperature=1.0)
            self._running = running.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def send(self, prompt: Sequence[int], tokens: int, **fields: Any) -> Answer:
        """One streamed answer, of so many tokens unless ``fields`` let the model end it."""
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        return exchange(self.port, {"prompt": list(prompt), "stream": True, **sampling, **self.body})
