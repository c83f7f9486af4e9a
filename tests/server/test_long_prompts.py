"""Prompts that take long: templates that loop, and texts of many tokens."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.spec.errors import InvalidRequest
from tests.routes.apis import APIS, RAW
from tests.server.conftest import byte_level_tokenizer
from tests.server.live import LiveServer
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.test_control_tokens import STYLES, controls, styled


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40)
@given(data=st.data())
def test_ids_are_the_librarys(style, data) -> None:
    tokenizer = styled(style)
    words = st.one_of(
        st.text(max_size=4), st.sampled_from([*controls(tokenizer), "<tool_call>", "<think>", "e\u0301", "  "])
    )
    text = "".join(data.draw(st.lists(words, max_size=20)))
    for special in (True, False):
        assert tokenizer.encode(text, special) == tokenizer._backend.encode(text, add_special_tokens=special).ids


def test_a_text_is_read_without_the_interpreters_lock() -> None:
    """Another thread goes on meanwhile: held, its pause would be as long as the reading every time."""
    tokenizer = styled("bundled")
    text = "Once upon a time there was a fox. " * 20_000

    def share() -> float:
        pauses, over = [0.0], threading.Event()

        def watch() -> None:
            last = time.perf_counter()
            while not over.is_set():
                time.sleep(0.001)
                pauses.append(time.perf_counter() - last)
                last += pauses[-1]

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        tokenizer.encode(text)
        took = time.perf_counter() - began
        over.set()
        watcher.join()
        return max(pauses) / took

    assert any(share() < 0.5 for _ in range(20)), "a busy machine makes others pause, but not always"


LONG = "Once upon a fox. " * 60_000
DOORS = [*APIS.values(), RAW]


@pytest.mark.parametrize("api", DOORS, ids=lambda api: api.path)
async def test_what_cannot_fit_is_refused(api, tokenizer) -> None:
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.post(api.path, json=api.asking(LONG))
        assert response.status == 400
        assert "maximum context length is 512 tokens. However, you requested at least" in await response.text()


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_a_prompt_that_is_cut_is_read(name, tokenizer) -> None:
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        body = APIS[name].asking(LONG, truncate_prompt_tokens=7, max_tokens=1)
        assert (await client.post(APIS[name].path, json=body)).status == 200
    assert len(engine.requests[0].prompt) == 7


# -- templates ---------------------------------------------------------------------------------------------------------


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
