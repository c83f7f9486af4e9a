"""A chat template that does not end costs its request, not the server, and keeps nobody from stopping it."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foresay.server.text import tokenizer as text
from foresay.server.text.tokenizer import TookTooLong, interrupted_after
from foresay.spec.errors import InvalidRequest
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


HOLDS_THE_LOCK = """
import sys, time
from foresay.server.text import tokenizer

patience = float(sys.argv[1])
tokenizer.LOCKED_SECONDS, tokenizer._LOOK_SECONDS = patience, patience / 5
with tokenizer.interrupted_after(600):
    time.sleep(2 * patience)  # others have their turn
with tokenizer.interrupted_after(600):
    pass
time.sleep(2 * patience)  # nothing is left behind
print("still here", flush=True)
with tokenizer.interrupted_after(600):
    9 ** (9 ** 9)
"""


def test_what_holds_the_interpreters_lock_ends_the_process() -> None:
    for patience in (1, 8):  # a machine that stalls for a second needs the longer one
        command = [sys.executable, "-c", HOLDS_THE_LOCK, str(patience)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.stdout:
            break
    assert (done.returncode, done.stdout) == (1, "still here\n"), done.stderr
    assert f"Timeout (0:00:0{patience})" in done.stderr


async def test_other_requests_go_on(monkeypatch) -> None:
    tokenizer = byte_level_tokenizer(ENDLESS)

    async def ask(client, content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}]}
        async with client.post("/v1/chat/completions", json=body) as response:
            await response.read()
            return int(response.status)

    async def meanwhile(client) -> bool:
        """Whether another one is answered while one renders."""
        endless = asyncio.create_task(ask(client, "on"))
        await asyncio.sleep(0.2)
        assert await ask(client, "off") == 200
        answered = not endless.done()
        assert await endless == 400
        return answered

    async with served(ScriptedEngine([END]), tokenizer) as client:
        for seconds in (1.0, 10.0, 30.0):  # as long as a busy machine takes for the other one
            monkeypatch.setattr(text, "RENDERING_SECONDS", seconds)
            if await meanwhile(client):
                break
        else:
            pytest.fail("nobody was answered while a template was rendered")
        assert await ask(client, "off") == 200


@pytest.mark.parametrize(
    ("template", "seconds", "says"),
    [("{% for i in range(10**12) %}{% endfor %}", 60.0, "too big"), (LOOP, 0.2, "too long")],
)
def test_it_is_an_error_of_the_messages(template, seconds, says, monkeypatch) -> None:
    monkeypatch.setattr(text, "RENDERING_SECONDS", seconds)
    with pytest.raises(InvalidRequest, match=says):
        byte_level_tokenizer(template).render([{"role": "user", "content": "x"}])


#: One instruction that holds the interpreter's lock for longer than anybody lives.
POWER = "{% set n = messages|length + 8 %}{{ (n**(n**n)) }}"


@pytest.mark.slow
@pytest.mark.parametrize(("template", "status", "says"), [(LOOP, 0, ""), (POWER, 1, "Timeout (0:00:03)!")])
def test_the_process_ends_while_a_template_is_rendered(tmp_path, template, status, says) -> None:
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED, directory)
    (directory / "chat_template.jinja").write_text(template)
    (tmp_path / "sitecustomize.py").write_text(
        "from foresay.server.text import tokenizer\ntokenizer.LOCKED_SECONDS = 3.0\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    # The tokenizer is loaded and its template tried: for ten seconds, if nobody ends it. A busy machine is later there.
    for seconds in (2, 12, 40):
        flags = (str(directory), "--draft", "none", "--dtype", "float32")
        with LiveServer(tmp_path / "log", *flags, variables=path) as server:
            while not _heeds_sigterm(server.process.pid):
                assert server.process.poll() is None, server.output
                time.sleep(0.1)
            time.sleep(seconds)
            server.terminate()
            ended = server.process.wait(60)
        if ended == status:
            break
    assert ended == status
    assert says in server.output and ("in render" in server.output) == (status == 1)


def _heeds_sigterm(process: int) -> bool:
    """Whether the process has a handler for it."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (signal.SIGTERM - 1) & 1)
