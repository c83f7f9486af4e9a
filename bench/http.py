"""What streaming costs: ``python -m bench.http --target DIR``. Starts a server of its own.

The same request streamed and not, in pairs in random order, wall time from the first byte sent to the last received.
The reader takes bytes off the socket as they come and looks at none of them before the end, so that its own parsing is
no part of the figure. Both answers must hold the same text.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench import prompts, record
from bench.drive import Options, add_arguments
from bench.stats import paired_ratio, percentile, spread


class ServerFailed(RuntimeError):
    """The server did not start, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One exchange. arrivals: seconds from the request to each piece taken off the socket."""

    seconds: float
    arrivals: list[float]
    text: str
    events: int


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(arguments: list[str]) -> Iterator[int]:
    """A running server's port; the server is drained and gone afterwards."""
    with running(arguments) as (_, port):
        yield port


@contextmanager
def running(
    arguments: list[str], patience: float = 300.0, errors: IO[bytes] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """As :func:`server`, its process and its port. errors: where its stderr goes; None: to ours."""
    command = [sys.executable, "-m", "foresay.server.cli.main", "serve", *arguments]
    with started(command, "/ready", patience, errors) as (process, port):
        yield process, port


@contextmanager
def started(
    command: list[str], path: str, patience: float = 300.0, errors: IO[bytes] | int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Any server that takes ``--port``, once ``path`` answers 200, and gone afterwards: its process and its port."""
    port = free_port()
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=errors)
    try:
        wait_until_ready(process, port, patience, path)
        yield process, port
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, patience: float, path: str = "/ready") -> None:
    """Return when ``path`` says yes."""
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


class Timed(NamedTuple):
    """A streamed completion. first, whole: seconds from the request to its first text, and to its end."""

    first: float
    whole: float
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens after the first, per second since then."""
        return (self.tokens - 1) / (self.whole - self.first)


def timed(port: int, body: dict[str, Any]) -> Timed:
    """Stream a completion. Nothing but the time of each event is looked at before the end, whoever serves."""
    asked = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    with closing(connection):
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ServerFailed(response.read().decode(errors="replace"))
        lines = [(time.perf_counter() - begun, line) for line in response if line.startswith(b"data: {")]
    events = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in lines]
    choices = [(at, event["choices"][0]) for at, event in events if event.get("choices")]
    texts = [at for at, choice in choices if choice.get("text")]
    ends = [at for at, choice in choices if choice.get("finish_reason")]
    usage = [event["usage"] for _, event in events if event.get("usage")]
    if not (ends and usage):
        raise ServerFailed(f"the stream ended with {lines[-1:]}")
    return Timed((texts or ends)[0], ends[0], usage[-1]["completion_tokens"])


def exchange(port: int, body: dict[str, Any]) -> Answer:
    """One completion; everything is parsed after the last byte."""
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    pieces, arrivals = [], []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        begun = time.perf_counter()
        connection.sendall(head.encode() + payload)
        while piece := connection.recv(1 << 16):
            arrivals.append(time.perf_counter() - begun)
            pieces.append(piece)
        seconds = time.perf_counter() - begun
    text, events = parse(b"".join(pieces), bool(body["stream"]))
    return Answer(seconds, arrivals, text, events)


def parse(raw: bytes, streamed: bool) -> tuple[str, int]:
    """The text of an HTTP answer and the number of its events (1 if not streamed)."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = dechunked(body)
    if b" 200 " not in head.splitlines()[0]:
        raise ServerFailed(body.decode(errors="replace"))
    if not streamed:
        return json.loads(body)["choices"][0]["text"], 1
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise ServerFailed(f"the stream ended with {lines[-1]}")
    choices = [json.loads(line).get("choices") or [{}] for line in lines[:-1]]
    return "".join(choice[0].get("text", "") for choice in choices), len(lines) - 1


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(body[:length])
        body = body[length + 2 :]


def measure(port: int, asked: list[list[int]], args: argparse.Namespace) -> list[tuple[Answer, Answer]]:
    """(streamed, not streamed) pairs, one prompt each, the first pair thrown away."""
    order, pairs = random.Random(args.seed), []
    for number in range(args.pairs + 1):
        body = {
            "model": None, "prompt": asked[number % len(asked)], "max_tokens": args.max_tokens, "ignore_eos": True,
            "temperature": args.temperature, "seed": args.seed + number,
        }  # fmt: skip
        answers = {stream: exchange(port, {**body, "stream": stream}) for stream in order.sample([True, False], 2)}
        if answers[True].text != answers[False].text:
            raise ServerFailed(f"streamed and not streamed differ:\n{answers[True].text}\n{answers[False].text}")
        pairs.append((answers[True], answers[False]))
    return pairs[1:]


def summarise(pairs: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Times in milliseconds."""
    gaps = [b - a for streamed, _ in pairs for a, b in zip(streamed.arrivals, streamed.arrivals[1:], strict=False)]
    return {
        "streamed_ms": spread([1e3 * streamed.seconds for streamed, _ in pairs]),
        "whole_ms": spread([1e3 * whole.seconds for _, whole in pairs]),
        "ratio": paired_ratio({str(n): [(s.seconds, w.seconds)] for n, (s, w) in enumerate(pairs)}),
        "ratio_of_medians": spread([s.seconds for s, _ in pairs]).median / spread([w.seconds for _, w in pairs]).median,
        "first_byte_ms": spread([1e3 * streamed.arrivals[0] for streamed, _ in pairs]),
        "events": spread([streamed.events for streamed, _ in pairs]).median,
        "gap_ms_p50": 1e3 * percentile(gaps or [0.0], 50),
        "gap_ms_p99": 1e3 * percentile(gaps or [0.0], 99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http", description="Streamed against not streamed.")
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=Path)
    args = parser.parse_args()
    encode = prompts.Encoder(Options.of(args).tokenizer)
    asked = [encode(prompt) for prompt in prompts.load(args.prompts)]
    flags = [args.target, "--dtype", args.dtype, "--draft", args.draft or "auto", "--no-prefix-cache"]
    flags += ["--draft-tokens", str(args.draft_tokens)]
    if args.threads:
        flags += ["--threads", str(args.threads)]
    with server(flags) as port:
        summary = summarise(measure(port, asked, args))
    record.table("streamed against not streamed", ["figure", "value"], [[k, v] for k, v in summary.items()])
    shape = {"pairs": args.pairs, "max_tokens": args.max_tokens, "temperature": args.temperature}
    shape["server_threads"] = args.threads
    names = {"target": Path(args.target).name, "draft": Path(args.draft).name if args.draft else "auto"}
    record.finish("http", {**names, **shape, **summary}, not args.no_save)


if __name__ == "__main__":
    main()
