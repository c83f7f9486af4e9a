"""``foresay chat`` with a running server: the same text as with an engine of its own, and which server it talks to. The
commands of a conversation are tried with both in test_chat.py."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from foresay.server.cli import chat, served
from foresay.server.cli.main import main
from foresay.server.cli.progress import stopping
from foresay.server.cli.serve import ServerGone, answer
from foresay.server.cli.served import ServedModel, ServedStream
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.sampling import SamplingParams
from tests.server.live import LiveServer
from tests.server.patched import PACED, existing, patched_path

KEY = "a-key-of-16-characters"
NOWHERE = "http://127.0.0.1:1"
ENGINE = ["--draft", "ngram", "--draft-tokens", "2", "--max-model-len", "512", "--dtype", "float32"]
TALK = "How many is 2 + 2?\n/set top_k unset\nAnd 3?\n/bye\n"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server that finds a file ``slow`` here takes its time."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    flags = ("bundled", *ENGINE, "--api-key", KEY)
    with LiveServer(folder / "log", *flags, variables={"PYTHONPATH": patched_path(PACED, folder)}) as server:
        yield server.wait_for_url()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[..., tuple[int, str, str]]:
    """Has a conversation; returns the exit status, the answers, and what was said about them."""

    def talked(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(TALK))
        status = main(["chat", *words, "--max-tokens", "24"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return talked


@pytest.mark.parametrize("words", [["--seed", "5"], ["--seed", "6", "--temperature", "1.3", "--top-k", "9"]])
def test_the_text_is_that_of_an_engine_of_its_own(url: str, talk: Any, words: list[str]) -> None:
    status, text, err = talk("--url", url, "--api-key", KEY, "--system", "Be brief.", *words)
    assert (status, err.splitlines()[0].partition(",")[0]) == (0, f"bundled at {url}")
    assert talk("bundled", *ENGINE, "--system", "Be brief.", *words)[:2] == (0, text)
    assert len(text.splitlines()) >= 2 and len(text) > 20


def test_a_whole_conversation_on_a_terminal(url: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("FORESAY_API_KEY", KEY)
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text("/provenance\rHow many is 2 + 2?\r/stats\r/compare\r/bye\r")
        assert main(["chat", "bundled", "--url", url, "--seed", "1", "--max-tokens", "12"]) == 0
    captured = capsys.readouterr()
    assert "the model's own " in captured.out
    first, *rest = captured.err.splitlines()
    assert first == f"bundled at {url}, drafted by ngram, temperature 0.7, top-p 0.95"
    assert rest[-1] == "the same text"
    assert any("prompt tokens were in the KV cache | " in line for line in rest)


def streamed(url: str, max_tokens: int = 400) -> ServedStream:
    (card,) = answer(url, "/v1/models", KEY)["data"]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return ServedModel(url, KEY, card).stream_chat([{"role": "user", "content": "A"}], params, stop=(), speculate=True)


def running(url: str) -> int:
    found: int = answer(url, "/load", KEY)["running"]
    return found


def test_ctrl_c_ends_a_read_that_waits_and_the_request(url: str, folder: Path) -> None:
    stream = streamed(url)
    with existing(folder / "slow", "0.3"), stopping(stream):
        next(stream)
        (folder / "slow").write_text("6")  # longer than the test waits
        time.sleep(0.6)
        assert running(url) == 1
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        completion = stream.result()
        waited = time.monotonic() - began
    assert (completion.finish_reason, completion.statistics) == ("cancelled", None)
    assert completion.text and waited < 5
    deadline = time.monotonic() + 60
    while running(url):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--url", "URL"], 1, "--url URL: "),
        (["--url", NOWHERE], 1, f"--url {NOWHERE}: no Foresay server answers there (Connection refused)"),
        (["smollm", "--url", "URL", "--api-key", KEY], 2, "TARGET smollm: URL serves bundled"),
        (["--draft", "none", "--url", "URL"], 2, "--draft is for an engine of one's own: leave it out, or --url"),
        (["--api-key", KEY], 2, "--api-key is for a server: give its --url too"),
    ],
)
def test_what_is_wrong_is_one_line(url: str, talk: Any, words: list[str], status: int, said: str) -> None:
    found, text, err = talk(*[word.replace("URL", url) for word in words])
    assert (found, text) == (status, "")
    assert err.startswith(f"foresay chat: {said.replace('URL', url)}") and err.count("\n") == 1


class Another(BaseHTTPRequestHandler):
    """Another program with OpenAI's API."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "root": "bundled", "owned_by": "another"}]}')

    def log_message(self, *ignored: object) -> None: ...


def test_another_programs_server_is_refused(talk: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Another) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert talk("--url", url) == (1, "", f"foresay chat: --url {url}: this is not a Foresay server\n")
        server.shutdown()


def test_a_prompt_that_is_too_long_is_refused_and_the_conversation_goes_on(url: str, talk: Any) -> None:
    status, text, err = talk("--url", url, "--api-key", KEY, "--system", "word " * 600)
    assert (status, text) == (0, "")
    assert err.count("This model's maximum context length is 512 tokens") == 2


def test_a_server_that_goes_away_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("0.2")
    flags = ("bundled", *ENGINE, "--api-key", KEY)
    with LiveServer(tmp_path / "log", *flags, variables={"PYTHONPATH": patched_path(PACED, tmp_path)}) as server:
        url = server.wait_for_url()
        stream, later = streamed(url), streamed(url)
        next(stream)
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerGone, match=f"{url}: the server went away in the middle of the answer"):
            stream.result()
        with pytest.raises(ServerGone, match=f"{url}: the server is gone"):
            later.result()


# -- which server ------------------------------------------------------------------------------------------------------


class Loaded(Exception):
    """An engine was about to be loaded."""


@pytest.fixture
def here(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A server at the default address, which needs no key."""

    def load(*_: object, **__: object) -> None:
        raise Loaded

    with LiveServer(tmp_path / "log", str(BUNDLED / "target"), *ENGINE) as server:
        found = server.wait_for_url()
        monkeypatch.setattr(served, "URL", found)
        monkeypatch.setattr(chat, "loaded", load)
        for variable in [name for name in os.environ if name.startswith("FORESAY_")]:  # the suite's
            monkeypatch.delenv(variable)
        monkeypatch.setenv("FORESAY_API_KEY", KEY)
        yield found


def test_the_server_that_has_the_very_model_answers(
    here: str, talk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in ("bundled", str(BUNDLED / "target"), f"{BUNDLED}/draft/../target"):
        status, text, err = talk(target)
        assert status == 0 and text
        assert err.startswith(f"the server at {here} has this model, so it answers; --no-server loads it here\n")
    copied = shutil.copytree(BUNDLED / "target", tmp_path / "target")
    for words in (
        ["bundled", "--no-server"],
        ["bundled", "--draft", "none"],
        ["bundled", "--dtype", "float32"],
        [copied],
    ):
        with pytest.raises(Loaded):
            talk(*map(str, words))
    for variable, value in (("FORESAY_DTYPE", "float32"), ("FORESAY_KV_DISK", "off")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(Loaded):
                talk("bundled")


def test_no_key_is_sent_to_a_server_that_was_not_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "URL", url)
    monkeypatch.setenv("FORESAY_API_KEY", KEY)
    assert served._found(SamplingConfig()) is None, "it asks for a key"


def test_a_relative_path_is_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(BUNDLED / "target", tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    for name in ("./target", "target"):
        assert not served._is_same(SamplingConfig(target=name), name)
    assert served._is_same(SamplingConfig(target="./target"), str(tmp_path / "target"))
    assert served._is_same(SamplingConfig(target="some/model"), "some/model")


def test_a_thought_is_shown_in_its_tags() -> None:
    stream = ServedStream(NOWHERE, None, {})
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": "m."},
        {},
        {"content": "Yes"},
        {"content": "."},
    ]
    assert [stream._spelled(delta) for delta in deltas] == ["", "<think>Hm", "m.", "", "</think>Yes", "."]
