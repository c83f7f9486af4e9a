"""llama.cpp's server as a peer: started once for each way of drafting, asked over HTTP, ended with the run.

Its ``timings`` say how long decoding took, the prompt and everything around it left out, which can only flatter it
beside engines whose tokens are counted when they are there.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS = 120.0
DRAFTED = 4


class Decoded(NamedTuple):
    """One answer. speed: tokens behind the first ones that came, over the time since then, per second."""

    tokens: list[int]
    speed: float


class LlamaServer:
    """A running ``llama-server``."""

    def __init__(self, url: str) -> None:
        self._url = url

    def decode(self, prompt: list[int], temperature: float, seed: int, max_tokens: int) -> Decoded:
        """The same sampling as ours: no filter, no penalty, no end, no cache of prompts."""
        asked = {
            "prompt": prompt, "n_predict": max_tokens, "temperature": temperature, "seed": seed, "ignore_eos": True,
            "cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_tokens": True,
        }  # fmt: skip
        answer = self._post("/completion", asked)
        timings = answer["timings"]
        # Its clock starts when the first token is there, which it counts.
        return Decoded(answer["tokens"], (timings["predicted_n"] - 1) / (timings["predicted_ms"] / 1000))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)


def ways(draft: Path | None) -> dict[str, list[str]]:
    """The flags of each way of drafting."""
    found = {"llama.cpp": [], "llama.cpp n-gram": ["--spec-type", "ngram-simple"]}
    if draft is not None:
        simple = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(DRAFTED), "-td", "{threads}"]
        found[f"llama.cpp draft:{DRAFTED}"] = ["-md", str(draft), *simple]
    return found


@contextmanager
def servers(program: Path, model: Path, draft: Path | None, threads: int) -> Iterator[dict[str, LlamaServer]]:
    """A server for each way. model, draft: in GGUF. threads: of each; they are asked one after the other."""
    with ExitStack() as stack:
        started = {}
        for way, flags in ways(draft).items():
            command = [
                str(program),
                "-m",
                str(model),
                "-t",
                "{threads}",
                "-c",
                "1024",
                "-np",
                "1",
                "--no-webui",
                *flags,
            ]
            words = [word.format(threads=threads) for word in command]
            started[way] = stack.enter_context(_running(words, way))
        yield started


@contextmanager
def _running(command: list[str], way: str) -> Iterator[LlamaServer]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*command, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if not _answers(process, f"http://127.0.0.1:{port}/health"):
                raise SystemExit(f"{way} did not start: {' '.join(command)}")
            yield LlamaServer(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether it is there before long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:  # it listens, or has loaded, a moment later
            time.sleep(0.2)
    return False


def version(program: Path) -> str:
    """What it says it is."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).splitlines()[0].removeprefix("version: ")
