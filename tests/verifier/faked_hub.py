"""A hub cache of a test's own, and as much of a hub on this machine as a download needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from huggingface_hub import close_session, constants

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


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs: one repository, and names that stand for its refusals."""

    FILES: ClassVar = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "consolidated.safetensors": b"the weights again",
        "README.md": b"words",
    }
    #: Files that break off in the middle the first time; and what of them was requested then.
    BREAKS: ClassVar[set[str]] = set()
    RANGES: ClassVar[list[str]] = []
    REFUSALS: ClassVar = {
        "owner/gated": (403, "GatedRepo"),
        "owner/absent": (404, "RepoNotFound"),
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
            self.give(path.partition("/resolve/")[2].partition("/")[2])
        else:
            self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())

    def give(self, name: str) -> None:
        """A file, or the rest of one that broke off."""
        data, headers = self.FILES[name], {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": COMMIT}
        requested = self.headers.get("Range", "")
        if requested and self.command == "GET":
            self.RANGES.append(requested)
            begin = int(requested.removeprefix("bytes=").partition("-")[0])
            about = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
            self.answer(data[begin:], 206, headers | about)
        elif name in self.BREAKS and self.command == "GET":
            self.BREAKS.discard(name)
            self.answer(data[: len(data) // 2], headers=headers | {"Content-Length": str(len(data))})
            self.close_connection = True
        else:
            self.answer(data, headers=headers)

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
