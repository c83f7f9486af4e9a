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
from foresay.server.text.time_limit import TimeIsUp, interrupted_after
from foresay.spec.errors import InvalidRequest
from tests.server.conftest import byte_level_tokenizer
from tests.server.live import LiveServer
from tests.server.scripted import END, ScriptedEngine, served

BUNDLED = Path(__file__).resolve().parents[2] / "server" / "bundled" / "target"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
#: Ends where the last message is not this one.
ENDLESS = "{% if messages[-1].content == 'on' %}" + LOOP + "{% endif %}{{ messages[-1].content }}"


def test_what_takes_too_long_is_interrupted_and_nothing_else() -> None:
    with pytest.raises(TimeIsUp), interrupted_after(0.05):
        sum(1 for _ in itertools.count())
    for _ in range(100):
        with interrupted_after(60):
            pass
    time.sleep(0.1)


HOLDS_THE_LOCK = """
import sys, time
from foresay.server.text import time_limit

time_limit.LOCKED_SECONDS = 0.2
with time_limit.interrupted_after(600):
    pass
for _ in range(3):
    with time_limit.interrupted_after(0.2):
        time.sleep(0.3)  # others have their turn
until = time.thread_time() + 0.5  # nothing is left behind
while time.thread_time() < until:
    pass
print("still here", flush=True)
with time_limit.interrupted_after(0.2):
    9 ** (9 ** 9)
"""


def test_what_holds_the_interpreters_lock_ends_the_process() -> None:
    command = [sys.executable, "-c", HOLDS_THE_LOCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGVTALRM, "still here\n"), done.stderr
    assert 'File "<string>", line 16' in done.stderr


IS_PROFILED = """
import cProfile, itertools
from foresay.server.text.time_limit import TimeIsUp, interrupted_after

def limited(seconds, numbers):
    with interrupted_after(seconds):
        for number in numbers:
            pass
    return number

profile = cProfile.Profile()
assert profile.runcall(limited, 60, range(9)) == 8
try:
    limited(0.05, itertools.count())
except TimeIsUp:
    print(profile.runcall(limited, 60, range(9)))
"""


def test_it_may_be_profiled() -> None:
    """Python 3.11 begins a function again and again under a profiler, while an interruption is announced that there is
    not."""
    done = subprocess.run([sys.executable, "-c", IS_PROFILED], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("8\n", "")


IS_STOPPED = """
import sys, time
from foresay.server.text import time_limit

time_limit.LOCKED_SECONDS = 0.2
with time_limit.interrupted_after(0.5):
    print("begun", flush=True)
    sys.stdin.readline()
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
print("still here", flush=True)
"""


def test_time_in_which_the_process_is_stopped_is_nobodys() -> None:
    command = [sys.executable, "-c", IS_STOPPED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # longer than both limits
        process.send_signal(signal.SIGCONT)
        assert process.communicate("go on\n")[0] == "still here\n"
    assert process.returncode == 0


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


def _server_of(tmp_path: Path, template: str) -> LiveServer:
    """A server that is starting: it tries its template at once."""
    directory = shutil.copytree(BUNDLED, tmp_path / "model")
    (directory / "chat_template.jinja").write_text(template)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    return LiveServer(tmp_path / "log", str(directory), "--draft", "none", "--dtype", "float32", variables=path)


@pytest.mark.slow
def test_a_server_is_stopped_while_it_renders_a_template(tmp_path) -> None:
    with _server_of(tmp_path, LOOP) as server:
        while not _heeds_sigterm(server.process.pid):
            assert server.process.poll() is None, server.output
            time.sleep(0.1)
        time.sleep(2)
        server.terminate()
        assert server.process.wait(180) == 0
        assert "in render" not in server.output


def _heeds_sigterm(process: int) -> bool:
    """Whether the process has a handler for it."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (signal.SIGTERM - 1) & 1)
