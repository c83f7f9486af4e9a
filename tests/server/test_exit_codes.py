"""2 where what was requested is wrong, 1 for the rest: of every command, each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from foresay.server.cli.main import COMMANDS
from tests.combinations import alternating
from tests.server import forked
from tests.server.live import ROOT
from tests.verifier.families import make

#: What each command needs to get as far as its settings.
NEEDED = {
    "quantize": ["bundled", "--out", "out"],
    "generate": ["--prompt", "x"],
    "deploy": ["ray"],
    "launch": ["claude"],
    "train": ["eagle3", "--prompts", "p", "--out", "o"],
    "pull": ["owner/model"],
    "config": ["show"],
    "keys": ["list"],
    "stop": ["model"],
    "rm": ["model"],
}
#: Commands that start from a model, and how they are told which.
WITH_MODEL = {
    "serve": ["NAME"],
    "generate": ["NAME", "--prompt", "x"],
    "chat": ["NAME"],
    "run": ["NAME"],
    "check": ["NAME"],
    "pull": ["NAME"],
    "prove": ["NAME"],
    "bench": ["NAME"],
    "train": ["draft", "--target", "NAME", "--prompts", "p.txt", "--out", "o"],
}


def foresay(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORESAY_")}
    command = [sys.executable, "-m", "foresay.server.cli", *arguments]
    environment = kept | {"HF_HUB_OFFLINE": "1"} | more
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, stdin=subprocess.DEVNULL
    )


def said(err: str, name: str) -> str:
    """What the command said last: one sentence under its name, no traceback."""
    assert "Traceback" not in err
    *_, last = err.splitlines()
    assert last.startswith(f"foresay {name}: "), err
    return last


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_flag_is_2(name: str) -> None:
    done = forked.foresay([name, *NEEDED.get(name, []), "--no-such-flag"])
    assert (done.status, done.out) == (2, "")
    assert "--no-such-flag" in said(done.err, name)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.config])
def test_a_wrong_variable_is_2(name: str) -> None:
    done = forked.foresay([name, *NEEDED.get(name, [])], variables={"FORESAY_DRAFT_TOKENS": "0"})
    assert done.status == 2
    assert "FORESAY_DRAFT_TOKENS must be a whole number from 1 to 63" in said(done.err, name)


@pytest.mark.parametrize("name", [*WITH_MODEL])
def test_a_model_that_is_not_there_is_1(name: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Once upon a time\n")
    missing = str(tmp_path / "gone")
    words = [
        {"NAME": missing, "p.txt": str(tmp_path / "p.txt"), "o": str(tmp_path / "o")}.get(w, w)
        for w in WITH_MODEL[name]
    ]
    done = forked.foresay([name, *words, *(["--port", "0"] if name == "serve" else [])])
    assert done.status == 1
    assert f"{missing}: no such file or directory" in done.out + done.err


def test_a_reader_that_is_gone_is_1() -> None:
    """What is left of commands that hardly can fail."""
    for words in (["version"], ["config"], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "foresay.server.cli", *words]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")


def test_closed_streams_are_no_error() -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-m", "foresay.server.cli", "version"]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_1() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "foresay.server.cli", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    said = b"foresay: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_port_in_use_is_1_and_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = forked.foresay(["serve", "--port", str(port)])
    assert done.status == 1
    assert f"port {port} on 127.0.0.1 is in use" in said(done.err, "serve")
    assert "choose another port with --port" in done.err


def test_serve_distinguishes_settings_that_do_not_fit_from_a_model_that_is_broken(tmp_path: Path) -> None:
    """Both are found by the engine, in another process; the tokenizer is none of its affairs."""
    done = forked.foresay(["serve", "--port", "0", "--max-model-len", "4000"])
    assert done.status == 2
    assert "--max-model-len 1024 is the most" in said(done.err, "serve")
    make("qwen2", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    done = forked.foresay(["serve", "--port", "0", "--draft", str(tmp_path)])
    assert done.status == 1
    assert "not a complete safetensors file" in said(done.err, "serve")


def test_a_hub_that_cannot_be_reached_is_1_and_names_what_needs_it(tmp_path: Path) -> None:
    away = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    listed = ", nor a name that foresay models or --help lists"
    for words, flag, more in ((["owner/m"], "TARGET owner/m", ""), (["--draft", "sufix"], "--draft sufix", listed)):
        done = foresay("serve", *words, "--port", "0", **away)
        assert done.returncode == 1
        here = f"{flag} is not a directory here{more}"
        assert f"{here}, and the hub at http://127.0.0.1:9 cannot be reached" in said(done.stderr, "serve")


#: Presses Ctrl-C when the module of this name is looked for.
PRESSES = """
import os, signal, sys

class Presses:
    def find_spec(self, name, *ignored):
        if name == os.environ["PRESSED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Presses())
"""
#: Where the installed command begins.
SCRIPT: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["foresay"]


WAYS = {
    "package": ["-m", "foresay.server.cli"],
    "script": ["-c", f"from {SCRIPT.replace(':', ' import ')} as run; run()"],
}
MODULES = ["msgspec", "foresay.server.cli.bench", "foresay.verifier.model.families.layer_extras"]


@pytest.mark.parametrize(("way", "module"), alternating(list(WAYS), MODULES))
def test_ctrl_c_while_commands_are_imported(tmp_path: Path, way: str, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRESSES)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PRESSED_AT": module}
    done = subprocess.run([sys.executable, *WAYS[way], "version"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
