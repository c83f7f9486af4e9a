"""Every coding agent by name, and llm, unmodified: each connects, streams an answer to its end, and finds its first
turn again in the second. The model says the same to everybody, by construction; engine, pages and server are real.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.clients.launching import PROGRAMS, launched, run
from tests.server.live import LiveServer
from tests.server.saying import saying
from tests.telemetry.scraping import scraped

pytestmark = pytest.mark.outside

#: Long enough that pages of it can be found again.
QUESTION = "Is there a fox? " * 80


class Agent(NamedTuple):
    """What is between its command and the question, and before that in the second turn. found: the least share of the
    second prompt that is found again."""

    words: tuple[str, ...]
    again: tuple[str, ...] = ()
    command: str = ""
    found: float = 0.95


_AIDER = ("--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes", "--analytics-disable")
AGENTS = {
    "claude": Agent(("--print",), ("--continue",)),
    "codex": Agent(("--skip-git-repo-check",), ("resume", "--last"), "exec"),
    "opencode": Agent((), ("--continue",), "run"),
    "copilot": Agent(("-p",), ("--continue",)),
    "continue": Agent(("-p",), ("--resume",)),
    "aider": Agent((*_AIDER, "--message"), ("--restore-chat-history",), found=0.4),  # rules follow the question
    "llm": Agent(("--key", "none"), ("--continue",)),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("agents")
    target = saying(folder / "target", "There is", " one.", context=65_536)
    flags = ("--draft", "none", "--served-model-name", "toy", "--kv-tokens", "65536", "--any-model-name")
    with LiveServer(folder / "log", target, *flags) as server:
        yield server.wait_for_url()


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[tuple[str, bytearray]]:
    """Another address of a server, and what the server says there."""
    output, going = bytearray(), set[asyncio.Task[None]]()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray) -> None:
        try:
            while piece := await source.read(1 << 16):
                kept += piece
                sink.write(piece)
        except ConnectionError:  # an agent that goes may reset its connection
            pass
        finally:
            sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far, back = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        await asyncio.gather(copy(reader, back, bytearray()), copy(far, writer, output))

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        going.add(asyncio.create_task(connected(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", output
    for task in going:  # an agent that has ended may have left a connection open
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)


def ask_llm(url: str, work: Path, *words: str) -> tuple[int, str]:
    home = work.parent / "llm"
    home.mkdir(exist_ok=True)
    models = f"- {{model_id: toy, model_name: toy, api_base: {url}/v1}}"
    (home / "extra-openai-models.yaml").write_text(models)
    done = run(work, "llm", "--model", "toy", *words, LLM_USER_PATH=str(home))
    return done.returncode, done.stdout + done.stderr


def ask(name: str, url: str, work: Path, question: str, again: bool) -> None:
    agent = AGENTS[name]
    words = [agent.command] * bool(agent.command) + [*(agent.again if again else ()), *agent.words, question]
    if name == "llm":
        status, output = ask_llm(url, work, *words)
    else:
        done = launched(name, url, work, *words)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0 and "There is one." in output, output


@pytest.mark.parametrize("name", AGENTS)
async def test_two_turns_stream_and_the_second_is_found_again(url, tmp_path, name):
    program = PROGRAMS["cn" if name == "continue" else name].split()[-1]
    if not Path(program).exists() and not os.environ.get("CI"):
        pytest.skip("make outside installs it where its registry has it")
    work = tmp_path / "work"
    work.mkdir()
    counts = []
    for question, again in ((QUESTION, False), ("And an owl?", True)):
        async with relay(url) as (address, output):
            await asyncio.to_thread(ask, name, address, work, question, again)
        assert b"text/event-stream" in output
        read = await scraped(url)
        counts.append((read.sum("foresay:prompt_tokens_total"), read.sum("foresay:prompt_tokens_cached_total")))
    (before, cached_before), (after, cached_after) = counts
    assert (cached_after - cached_before) / (after - before) >= AGENTS[name].found
