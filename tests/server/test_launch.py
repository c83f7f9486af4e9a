"""``foresay launch``: an agent on a server, neither of which leaves anything behind."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.serving import free_port
from foresay.server.catalog.catalog import known_agents, known_targets, models_for_agents
from foresay.server.cli import launch, serve
from foresay.server.cli.main import main
from foresay.spec.errors import ForesayError
from tests.server.live import ROOT


def toy(*flags: str) -> list[str]:
    """The bundled toy, which suffices for no agent, at a port that is free now."""
    return ["bundled", "--draft", "none", "--port", str(free_port()), *flags]


#: Of a command line: the flags of :func:`toy`.
TOY = "TOY"
#: Of a server that is said to be there: its health, its models, and what one of them can do.
THERE = {"status": "ok", "model": "coder", "target": "Qwen/Qwen3-8B", "engine_starts": 1}
MODELS: dict[str, list[dict[str, object]]] = {
    "data": [{"id": "coder", "max_model_len": 40_960}, {"id": "small", "max_model_len": 2048}]
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command of an agent that does nothing, the only one there is."""
    place = tmp_path / "bin" / "claude"
    place.parent.mkdir()
    write(place, "exit 0")
    monkeypatch.setenv("PATH", f"{place.parent}:/usr/bin:/bin")
    return place


def write(place: Path, script: str) -> None:
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A server is there; what its models can do may be changed."""
    can = {"coder": ["completion", "tools"], "small": ["completion"]}

    def answer(url: str, path: str, key: str, seconds: float, body: Mapping[str, str] | None = None) -> object:
        return MODELS if body is None else {"capabilities": can[body["model"]]}

    monkeypatch.setattr(launch, "_health", lambda url, patient=True: THERE)
    monkeypatch.setattr(launch, "answer", answer)
    return can


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["gemini"], 2, "Gemini CLI cannot be used: it speaks only Google's API"),
        (["codex"], 1, "codex is not installed; to install Codex CLI: npm install -g @openai/codex"),
        (["cloud"], 2, "invalid choice: 'cloud' (choose from"),
        (["claude", "--url", "127.0.0.1:1"], 1, "--url http://127.0.0.1:1: no Foresay server answers there"),
        (
            ["claude", "--port", "1", "--draft", "none"],
            2,
            "no server answers at http://127.0.0.1:1: which model to serve? ",
        ),
        (["claude", "--url", "https://127.0.0.1:x"], 2, "--url https://127.0.0.1:x: the port must be a number up to "),
        (["claude", TOY], 2, "needs a context of 28,672 tokens (it has 1,024). "),
        (["claude", TOY, "--api-key-file", "gone"], 1, "the server ended before it was ready (exit status 2)"),
    ],
    ids=["gemini", "no-codex", "typo", "no-url", "no-target", "no-port", "too-small", "no-server"],
)
def test_what_cannot_be_is_refused_in_a_sentence(agent, capfd, words, status, message) -> None:
    with pytest.raises(SystemExit) if words == ["cloud"] else pytest.MonkeyPatch.context():
        given = [flag for word in words for flag in (toy() if word == TOY else [word])]
        assert main(["launch", *given]) == status
    err = capfd.readouterr().err
    assert message in err and err.splitlines()[-1].startswith("foresay launch: ")


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.0 200 OK\r\n\r\n{}"])
def test_a_port_that_something_else_has_is_named(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(says)

        threading.Thread(target=answer).start()
        with pytest.raises(ForesayError, match="is used by something other than Foresay: give another --port"):
            launch._health(url)


class Busy(BaseHTTPRequestHandler):
    """Breaks off the first time, then says nothing so often, and after that answers."""

    asked, silent, over = 0, 1, threading.Event()

    def do_GET(self) -> None:
        Busy.asked += 1
        if 1 < Busy.asked <= 1 + Busy.silent:
            Busy.over.wait()
        elif Busy.asked > 1:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "engine_starts": 1}')

    def log_message(self, *ignored: object) -> None: ...


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of such a server."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 0.2)
    Busy.asked, Busy.silent, Busy.over = 0, 1, threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Busy.over.set()
        server.shutdown()


def test_a_proxy_is_not_asked_for_this_machine(busy: str, monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    Busy.asked = 1 + Busy.silent
    assert launch._health(busy) == {"status": "ok", "engine_starts": 1}
    with pytest.raises(ForesayError, match="no Foresay server answers there"):
        serve.answer(busy.replace("127.0.0.1", "foresay.invalid"), "/v1/models", "none")
    assert launch._health("http://foresay.invalid") is None, "the proxy refused, which nobody asked for 127.0.0.1"


def test_beside_a_server_that_answers_late_none_is_started(busy: str, agent, capfd) -> None:
    """It would have the same address, and the agent the other one's model."""
    assert main(["launch", "claude", "bundled", "--url", busy]) == 1
    assert f"{busy} cannot be reached: " in capfd.readouterr().err


def test_a_server_of_ours_may_answer_late_while_it_loads(busy: str) -> None:
    """Or break off: a busy machine may keep it from answering, as long as it lives."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            launch._wait(busy, process)
            assert Busy.asked > 2
            Busy.silent = 1 << 30
            process.kill()
            process.wait()
            with pytest.raises(ForesayError, match=r"ended before it was ready \(exit status -9\)"):
                launch._wait(busy, process)
        finally:
            process.kill()
    with pytest.raises(ForesayError, match="takes no requests: it is gone"):
        launch._wait(busy)


def test_a_certificate_that_is_not_trusted_is_not_waited_for() -> None:
    """It will not be trusted later either."""
    place = ROOT / "tests/gateway/tls"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "certificate.pem", place / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server, subprocess.Popen(["sleep", "60"]) as process:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(ForesayError, match=r"cannot be reached.*CERTIFICATE_VERIFY_FAILED"):
                launch._wait(f"https://127.0.0.1:{server.server_port}", process)
        finally:
            process.kill()
            server.shutdown()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smollm2"], "serves Qwen/Qwen3-8B already: leave out smollm2 to use it"),
        (["--model", "huge"], "--model huge: http://127.0.0.1:8000 serves coder, small"),
        (
            ["--model", "small"],
            "small does not suffice: Claude Code needs a chat template with tools and a context of ",
        ),
    ],
)
def test_a_server_that_does_not_suffice_is_not_used(agent, there, capfd, words, message) -> None:
    assert main(["launch", "claude", *words]) == 2
    assert message in capfd.readouterr().err


def test_it_says_if_a_model_rarely_calls_tools(agent, there, capfd, monkeypatch) -> None:
    """Once with, once without; the agent is started anyway."""
    for rarely in (True, False):
        monkeypatch.setitem(MODELS["data"][0], "rarely_calls_tools", rarely)
        assert main(["launch", "claude"]) == 0
        said = "coder rarely calls tools, without which Claude Code does little" in capfd.readouterr().err
        assert said is rarely


def test_the_agent_gets_a_server_that_is_there(agent, there, capfd, monkeypatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-other")
    monkeypatch.setenv("FORESAY_API_KEY", "k" * 16)
    write(agent, 'env; echo "given: $*"; exit 42')
    assert main(["launch", "claude", "Qwen/Qwen3-8B", "--", "--print", "What is $HOME?", "--url"]) == 42
    output = capfd.readouterr().out.splitlines()
    variables = dict(line.split("=", 1) for line in output if "=" in line)
    assert output[-1] == "given: --print What is $HOME? --url" and "ANTHROPIC_API_KEY" not in variables
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"]) == ("http://127.0.0.1:8000", "k" * 16)
    assert (variables["ANTHROPIC_MODEL"], variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == ("coder", "40960")
    assert os.environ["ANTHROPIC_API_KEY"] == "sk-ant-other" and "ANTHROPIC_MODEL" not in os.environ


@pytest.mark.parametrize("url", ["https://gpu.example", "http://gpu.example/", "http://[::1]", "gpu.example"])
def test_an_address_needs_no_port(agent, there, capfd, tmp_path, monkeypatch, url: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write(agent, "echo $ANTHROPIC_BASE_URL")
    assert main(["launch", "claude", "--url", url]) == 0
    assert capfd.readouterr().out.strip() == (url if "://" in url else f"http://{url}").rstrip("/")


@pytest.mark.parametrize(
    ("limit", "own", "output"), [({}, None, 8192), ({"max_tokens": 2048}, None, 2048), ({"max_tokens": 2048}, "99", 99)]
)
def test_an_agent_writes_as_much_as_server_and_user_say(agent, there, capfd, monkeypatch, limit, own, output) -> None:
    monkeypatch.setitem(MODELS, "data", [MODELS["data"][0] | limit])
    if own:
        monkeypatch.setenv("CLAUDE_CODE_MAX_OUTPUT_TOKENS", own)
    write(agent, "echo $CLAUDE_CODE_MAX_OUTPUT_TOKENS")
    assert main(["launch", "claude"]) == 0
    assert capfd.readouterr().out.strip() == str(output)


@pytest.mark.parametrize("name", [name for name, one in known_agents().items() if not one.cannot])
def test_everything_of_an_agent_is_filled_in(tmp_path: Path, name: str) -> None:
    values: dict[str, str | int] = {
        "url": "http://h:1",
        "key": "KEY",
        "model": 'a"b$c',
        "context": 32_768,
        "output": 8192,
    }
    command, variables = known_agents()[name].started(values, tmp_path)
    files = "".join(file.read_text() for file in tmp_path.iterdir())
    everything = " ".join([*command, *variables.values(), files])
    assert "http://h:1" in everything and "KEY" in everything and "$" not in everything.replace("b$c", "")
    assert 'a"b$c' in everything or r"a\"b$c" in everything


def test_models_that_are_advised_are_in_the_catalog() -> None:
    assert {*models_for_agents("gpu"), *models_for_agents("cpu")} <= set(known_targets())


def test_settings_are_passed_on_as_they_were_given() -> None:
    given = Namespace(config="c.toml", target="t", graphs=False, prefix_cache=True, api_key=["a b", "c"], url=None)
    assert launch._given(given) == [
        "t", "--config", "c.toml", "--no-graphs", "--prefix-cache", "--api-key=a b", "--api-key=c"
    ]  # fmt: skip


# -- a server of its own -----------------------------------------------------------------------------------------------

#: Of the agent's script: the process of the server, which is the launcher's other child.
SERVER = "for child in $(cat /proc/$PPID/task/*/children); do [ $child = $$ ] || server=$child; done"


#: After which something hangs.
SECONDS = 300.0
USES = "Claude Code uses bundled at http://127.0.0.1:"


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@contextmanager
def launching(place: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """It is ended, and its server with it, if the test fails."""
    (place / "temporary").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(place / "temporary")}
    # Whoever runs the tests may ignore Ctrl-C, and what begins so cannot hear it.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    begun = f"{heard} from foresay.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", begun, "launch", "claude", *words]
    with subprocess.Popen(
        line, cwd=place, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


def until(there: Path, *running: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not there.exists():
        assert all(one.poll() is None for one in running) and time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "sent", "status", "message"),
    [
        ("exit 5", None, 5, USES),
        pytest.param("kill -TERM $$", None, 128 + signal.SIGTERM, USES, marks=pytest.mark.soak),
        ("trap 'exit 6' INT; touch up; while :; do sleep 0.1; done", signal.SIGINT, 6, USES),
        pytest.param(
            "trap 'exit 7' TERM; touch up; while :; do sleep 0.1; done", signal.SIGTERM, 7, USES, marks=pytest.mark.soak
        ),
        (
            "kill -9 $server; while grep -q State:.[^Z] /proc/$server/status; do sleep 0.1; done; exit 3",
            None,
            3,
            "the server ended while it was needed (exit status -9)",
        ),
    ],
    ids=["ends", "is-killed", "ctrl-c", "terminated", "server-dies"],
)
def test_a_server_ends_with_its_agent(agent, tmp_path, script, sent, status, message) -> None:
    write(agent, f"{SERVER}; echo $server > pid; {script}")
    with launching(tmp_path, *toy("--anyway")) as launcher:
        if sent is not None:
            until(tmp_path / "up", launcher)
            # Ctrl-C goes to all that are in the foreground.
            os.killpg(launcher.pid, sent) if sent == signal.SIGINT else launcher.send_signal(sent)
        _, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == status and message in err, err
    assert not alive(int((tmp_path / "pid").read_text())), "nothing is left"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo up; exit 1", 1),
        ("trap 'sleep 0.2; kill -9 $$' TERM; echo up; read go", -signal.SIGKILL),
        ("trap 'exit 0' TERM; echo up; read go", None),
        ("echo up; read go", None),
    ],
    ids=["ended", "dies", "drains", "is-ended"],
)
def test_a_server_that_is_still_dying_was_not_ended_by_us(script, status) -> None:
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        if status == 1:
            process.wait()
        assert launch._end(process) == status


def test_a_server_stays_for_a_second_agent(agent, tmp_path) -> None:
    write(agent, f'{SERVER}; [ -n "$1" ] || echo $server > pid; touch up$1; until [ -e end$1 ]; do sleep 0.1; done')
    words = toy("--anyway")
    with launching(tmp_path, *words) as first:
        until(tmp_path / "up", first)
        with launching(tmp_path, *words, "--", "2") as second:
            until(tmp_path / "up2", first, second)
            (tmp_path / "end").touch()
            assert first.stderr is not None
            assert any("ends with the last agent that uses it" in line for line in first.stderr)
            pid = int((tmp_path / "pid").read_text())
            assert first.poll() is None and alive(pid)
            (tmp_path / "end2").touch()
        first.communicate(timeout=SECONDS)
    assert (first.returncode, second.returncode) == (0, 0) and not alive(pid)
    assert list((tmp_path / "temporary").iterdir()) == []
