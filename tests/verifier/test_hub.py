"""Names of models: directories, cached hub repositories without a network, and every way of not finding one."""

from __future__ import annotations

import fnmatch
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from huggingface_hub import close_session, constants

from verifier.heads.kind import PATTERNS as HEAD_PATTERNS
from verifier.model.errors import ModelNotFound
from verifier.model.hub import PATTERNS, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """A hub cache of its own, offline. The hub's client reads its environment at import, hence the constants."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # the client of an earlier test may have been made for another network
    yield tmp_path / "cache"
    close_session()


def snapshot(cache: Path, *files: str) -> Path:
    repository = cache / "models--owner--model"
    directory = repository / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files:
        (directory / file).write_text("{}")
    return directory


def refused(name, *words, revision=None):
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, revision)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_directory_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_relative_directory_and_home(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("model") == Path("model")
    assert resolve("~/model") == tmp_path / "model"


def test_a_directory_without_config(tmp_path):
    refused(tmp_path, str(tmp_path), "no config.json")


def test_a_file(tmp_path):
    (tmp_path / "model").write_text("")
    refused(tmp_path / "model", "is a file; name the directory that holds it")


GGUF = "is in GGUF, which is not read yet: name the safetensors checkpoint that it was made from"


@pytest.mark.parametrize(("name", "content"), [("model.gguf", b""), ("blob", b"GGUF\3\0\0\0"), ("model.gguf", b"GGUF")])
def test_a_file_of_llama_cpp_is_named_as_such(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, f"{tmp_path / name} {GGUF}")
    if name.endswith(".gguf"):
        refused(tmp_path, f"{tmp_path} {GGUF}")
        (tmp_path / "config.json").write_text("{}")
        refused(tmp_path, f"{tmp_path} {GGUF}")
        (tmp_path / "model.safetensors").write_bytes(b"")
        assert resolve(tmp_path) == tmp_path


def test_a_cached_repository_of_llama_cpp_is_named_as_such(cache):
    directory = snapshot(cache)
    directory.parents[1].rename(cache / "models--owner--model-GGUF")
    refused("owner/model-GGUF", f"owner/model-GGUF {GGUF}")


def test_messages_name_the_flag(tmp_path):
    with pytest.raises(ModelNotFound, match=r"^--draft /no/such: no such directory$"):
        resolve("/no/such", flag="--draft")


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model/of/mine", "a/b/c"])
def test_a_path_is_never_looked_up_on_the_hub(name, cache):
    refused(name, "no such directory")


@pytest.mark.parametrize("name", ["owner/mo del", "owner/model--x", "bad..name"])
def test_neither_path_nor_repository(name, cache):
    refused(name, "neither a directory nor a hub repository")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_repository_needs_no_network(cache, revision):
    directory = snapshot(cache, "config.json", "model.safetensors")
    assert resolve("owner/model", revision) == directory


def test_a_cached_repository_without_config(cache):
    snapshot(cache, "model.safetensors")
    refused("owner/model", "no config.json")


def test_offline_and_not_cached(cache):
    refused("owner/model", "owner/model is no directory", "HF_HUB_OFFLINE is set", str(cache), "download it")
    snapshot(cache, "config.json")
    refused("owner/model", "owner/model (revision v2)", "HF_HUB_OFFLINE is set", revision="v2")


def test_hub_out_of_reach(cache, monkeypatch):
    """A connection that is really refused: nothing listens on the port."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("owner/model", "the hub at http://127.0.0.1:9 cannot be reached (", "check the connection, or download it")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs: one repository, and names that stand for its refusals."""

    FILES: ClassVar = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "consolidated.safetensors": b"the weights again",
        "README.md": b"words",
    }
    REFUSALS: ClassVar = {
        "owner/gated": (403, "GatedRepo"),
        "owner/absent": (404, "RepoNotFound"),
        "owner/other-revision": (404, "RevisionNotFound"),
        "owner/broken": (400, "Broken"),
    }

    def do_GET(self):
        path = urlsplit(self.path).path
        refusal = next((answer for name, answer in self.REFUSALS.items() if name in path), None)
        if refusal:
            self.answer(b"", status=refusal[0], headers={"X-Error-Code": refusal[1]})
        elif "/tree/" in path:
            files = [
                {"type": "file", "path": n, "size": len(d), "oid": n.encode().hex()} for n, d in self.FILES.items()
            ]
            self.answer(json.dumps(files).encode())
        elif "/resolve/" in path:
            name = path.rsplit("/", 1)[1]
            self.answer(self.FILES[name], headers={"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())

    do_HEAD = do_GET  # noqa: N815

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(cache, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + TEMPLATE)
        yield server
        server.shutdown()
        thread.join()


def test_download(hub, cache, monkeypatch):
    """What is not read is not fetched, above all not a second copy of the weights."""
    directory = resolve("owner/model")
    assert directory == cache / "models--owner--model" / "snapshots" / COMMIT
    assert {file.name for file in directory.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("owner/model") == directory


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/gated", ["gated", "accept its terms at", "/owner/gated", "hf auth login"]),
        ("owner/absent", ["no such repository", "private"]),
        ("owner/other-revision", ["no such revision"]),
        ("owner/broken", ["the hub at http", "answered with an error", "Bad request", "try again"]),
    ],
)
def test_what_the_hub_answers_is_told_with_what_to_do(hub, name, words):
    refused(name, name, *words)


def test_a_download_that_breaks_off(hub, cache):
    """The cache cannot be written to: it stands where a file is."""
    cache.write_text("in the way")
    refused("owner/model", "download from the hub failed", str(cache))


def test_only_the_files_that_are_read_are_downloaded():
    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    spared = ["consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md", "original/params.json"]
    spared += ["model.pt", "model.safetensors.py", "tokenization_evil.py", "tokenizer.py", "tokenizer.model.py"]
    assert [file for file in wanted + spared if any(fnmatch.fnmatch(file, each) for each in PATTERNS)] == wanted


def test_no_code_is_downloaded_with_a_head():
    names = ["medusa_lm_head.py", "pytorch_model.bin.py", "pytorch_model.py", "custom_generate/generate.py"]
    assert not [name for name in names for each in HEAD_PATTERNS if fnmatch.fnmatch(name, each)]
