"""A chat template that does not end costs its request, not the server, and keeps nobody from stopping it."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server import text
from server.interrupt import TookTooLong, interrupted_after
from spec.errors import InvalidRequest
from tests.server.conftest import byte_level_tokenizer
from tests.server.live import LiveServer
from tests.server.scripted import END, ScriptedEngine, served

BUNDLED = Path(__file__).resolve().parents[2] / "server" / "bundled" / "target"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
#: Ends where the last message is not this one.
ENDLESS = "{% if messages[-1].content == 'on' %}" + LOOP + "{% endif %}{{ messages[-1].content }}"


def test_what_takes_too_long_is_interrupted_and_nothing_else() -> None:
    with pytest.raises(TookTooLong), interrupted_after(0.05):
        sum(1 for _ in itertools.count())
    for _ in range(100):
        with interrupted_after(60):
            pass
    time.sleep(0.1)


def test_what_holds_the_interpreters_lock_ends_the_process() -> None:
    program = """
import time
from server import interrupt

interrupt.LOCKED_SECONDS, interrupt._LOOK_SECONDS = 1.0, 0.2
with interrupt.interrupted_after(60):
    time.sleep(2)  # others have their turn
with interrupt.interrupted_after(60):
    pass
time.sleep(2)  # nothing is left behind
print("still here", flush=True)
with interrupt.interrupted_after(60):
    9 ** (9 ** 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "still here\n"), done.stderr
    assert "Timeout (0:00:01)" in done.stderr


async def test_other_requests_go_on(monkeypatch) -> None:
    monkeypatch.setattr(text, "RENDERING_SECONDS", 1.0)
    tokenizer = byte_level_tokenizer(ENDLESS)

    async def ask(client, content: str) -> tuple[int, float]:
        began = time.monotonic()
        body = {"messages": [{"role": "user", "content": content}]}
        response = await client.post("/v1/chat/completions", json=body)
        await response.read()
        return response.status, time.monotonic() - began

    async with served(ScriptedEngine([END]), tokenizer) as client:
        endless = asyncio.create_task(ask(client, "on"))
        await asyncio.sleep(0.2)
        assert (await ask(client, "off"))[0] == 200
        assert not endless.done()
        assert (await endless)[0] == 400
        assert (await ask(client, "off"))[0] == 200


@pytest.mark.parametrize(
    ("template", "says"), [("{% for i in range(10**12) %}{% endfor %}", "too big"), (LOOP, "too long")]
)
def test_it_is_an_error_of_the_messages(template, says, monkeypatch) -> None:
    monkeypatch.setattr(text, "RENDERING_SECONDS", 0.2)
    with pytest.raises(InvalidRequest, match=says):
        byte_level_tokenizer(template).render([{"role": "user", "content": "x"}])


#: One instruction that holds the interpreter's lock for longer than anybody lives.
POWER = "{% set n = messages|length + 8 %}{{ (n**(n**n)) }}"


@pytest.mark.slow
@pytest.mark.parametrize(("template", "status", "says"), [(LOOP, 0, ""), (POWER, 1, "Timeout (0:00:15)!")])
def test_the_process_ends_while_a_template_is_rendered(tmp_path, template, status, says) -> None:
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED, directory)
    (directory / "chat_template.jinja").write_text(template)
    with LiveServer(tmp_path / "log", str(directory), "--draft", "none", "--dtype", "float32") as server:
        while not _heeds_sigterm(server.process.pid):
            assert server.process.poll() is None, server.output
            time.sleep(0.1)
        time.sleep(6)  # the tokenizer is loaded and its template tried: for ten seconds, if nobody ends it
        server.terminate()
        assert server.process.wait(60) == status
        assert says in server.output and ("in render" in server.output) == (status == 1)


def _heeds_sigterm(process: int) -> bool:
    """Whether the process has a handler for it."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (signal.SIGTERM - 1) & 1)
