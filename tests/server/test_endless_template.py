"""A chat template that does not end keeps nobody from stopping the server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from foresay.spec.errors import InvalidRequest
from tests.server.conftest import byte_level_tokenizer
from tests.server.live import LiveServer

BUNDLED = Path(__file__).resolve().parents[2] / "server" / "bundled" / "target"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_a_loop_that_is_too_long_is_an_error_of_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="too big"):
        byte_level_tokenizer("{% for i in range(10**12) %}{% endfor %}").render([{"role": "user", "content": "x"}])


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
