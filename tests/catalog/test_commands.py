"""``foresay pull`` and ``foresay models`` against a hub on this machine, and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import enable_progress_bars

from foresay.server.catalog import catalog
from foresay.server.cli.main import main
from foresay.server.settings.resolved import BUNDLED
from tests.same_tokens.test_gguf import file_of
from tests.verifier.faked_hub import COMMIT, Hub, snapshot
from tests.verifier.gguf_files import cache_of_its_own, q4_k_m

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair(monkeypatch):
    """The hub's model is a target whose draft is another of its models."""
    known = catalog.known_targets()["Qwen/Qwen3-8B"]
    draft = catalog.KnownDraft(id="owner/draft", kind="draft_model", parameters=1, numbers_per_token=1)
    known = catalog.KnownTarget(id="owner/model", shape=known.shape, drafts=(draft,))
    monkeypatch.setattr(catalog, "known_targets", lambda: {"owner/model": known})


def test_pull_fetches_once_and_prints_the_path(hub, cache, capsys, monkeypatch):
    enable_progress_bars()  # another command may have put them away in this process
    assert main(["pull", "owner/model"]) == 0
    where = cache / "models--owner--model" / "snapshots" / COMMIT
    printed = capsys.readouterr()
    assert printed.out == f"owner/model: {where}\nserve it: foresay serve owner/model\n"
    assert "Fetching" in printed.err or "model.safetensors" in printed.err, "there is progress to see"
    assert (where / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["pull", "owner/model"]) == 0


def test_pull_goes_on_where_it_was_broken_off(hub, cache, capsys, monkeypatch):
    whole = bytes(range(256)) * 100_000  # the hub client keeps what came in pieces of 10 MB
    monkeypatch.setattr(Hub, "FILES", {"config.json": b"{}", "model.safetensors": whole})
    monkeypatch.setattr(Hub, "BREAKS", {"model.safetensors"})
    monkeypatch.setattr(Hub, "RANGES", [])
    while main(["pull", "owner/model"]):
        assert "download from the hub failed" in capsys.readouterr().err
    where = cache / "models--owner--model" / "snapshots" / COMMIT
    assert (where / "model.safetensors").read_bytes() == whole
    assert Hub.RANGES and Hub.RANGES[0] != "bytes=0-", "it did not begin again"


@pytest.mark.soak
def test_pull_of_one_of_several_gguf_files_goes_on_where_it_was_broken_off(hub, cache, tmp_path, monkeypatch):
    """In a process of its own, which has the hub's client as users have it."""
    file = file_of(tmp_path, "target", q4_k_m)
    whole = file.read_bytes().ljust(25 << 20, b"\0")  # the hub client keeps what came in pieces of 10 MB
    monkeypatch.setattr(Hub, "FILES", {"m-Q4_K_M.gguf": whole, "m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
    monkeypatch.setattr(Hub, "BREAKS", {"m-Q4_K_M.gguf"})
    monkeypatch.setattr(Hub, "RANGES", [])
    cache_of_its_own(tmp_path / "xdg", monkeypatch)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", constants.ENDPOINT)
    command = [sys.executable, "-m", "foresay.server.cli", "pull", "owner/model-GGUF"]
    while (done := subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)).returncode:
        assert "download from the hub failed" in done.stderr
    (there,) = (tmp_path / "hf").rglob("snapshots/*/*.gguf")
    assert there.name == "m-Q4_K_M.gguf" and there.read_bytes() == whole
    assert Hub.RANGES and Hub.RANGES[0] != "bytes=0-", "it did not begin again"
    first, *lines = done.stdout.splitlines()
    assert (Path(first.removeprefix("owner/model-GGUF: ")) / "model.gguf").read_bytes() == whole
    assert lines == ["serve it: foresay serve owner/model-GGUF"]
    assert "m-Q4_K_M.gguf" in done.stderr and "100%" in done.stderr, "there is progress to see"


def test_pull_of_gguf_files_with_the_draft_that_fits(cache, capsys, monkeypatch):
    fetched = list[str]()

    def resolved(name: str, **_: object) -> Path:
        fetched.append(name)
        return BUNDLED / "target"

    monkeypatch.setattr("foresay.server.cli.pull.resolve", resolved)
    name = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"
    assert main(["pull", name, "--draft"]) == 0
    draft = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
    assert fetched == [name, draft]
    assert capsys.readouterr().out.splitlines()[-1] == f"serve it: foresay serve {name} --draft {draft}"
    assert main(["models", name]) == 0
    shown = capsys.readouterr().out
    assert f"with {draft}" in shown and f"foresay pull {name} --draft" in shown and "--quantize" not in shown


def test_pull_with_the_draft_that_fits(hub, cache, pair, capsys):
    assert main(["pull", "owner/model", "--draft"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "serve it: foresay serve owner/model --draft owner/draft"
    assert (cache / "models--owner--draft" / "snapshots" / COMMIT / "model.safetensors").exists()


def test_pull_of_a_head_fetches_what_heads_are_stored_as(hub, cache, capsys, monkeypatch):
    config = json.dumps({"medusa_num_heads": 3}).encode()
    monkeypatch.setattr(Hub, "FILES", {"config.json": config, "medusa_lm_head.pt": b"weights", "evil.py": b"code"})
    assert main(["pull", "owner/model"]) == 0
    where = cache / "models--owner--model" / "snapshots" / COMMIT
    assert {file.name for file in where.iterdir()} == {"config.json", "medusa_lm_head.pt"}


def test_pull_of_what_cannot_be_served(hub, cache, capsys, monkeypatch):
    monkeypatch.setattr(Hub, "FILES", {"config.json": b"{}", "pytorch_model.bin": b"pickled"})
    assert main(["pull", "owner/model"]) == 1
    assert "owner/model holds no safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words", "wanted"),
    [
        (["owner/absent"], "no such repository", 1),
        (["owner/gated"], "gated", 1),
        (["owner/mo del"], "neither a directory nor a hub repository", 1),
        (["../../etc/passwords"], "no such file or directory", 1),
        (["/etc/passwd"], "is a file", 1),
        (["owner/model\x00"], "neither a directory nor a hub repository", 1),
        (["nobody/nothing", "--draft"], "no draft is known for nobody/nothing; foresay models lists", 2),
        (["bundled"], "comes with Foresay", 2),
        (["-" * 3000 + "x/y"], "neither a directory nor a hub repository", 1),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(hub, cache, capsys, arguments, words, wanted):
    status = main(["pull", "--", *arguments] if arguments[0].startswith("-") else ["pull", *arguments])
    printed = capsys.readouterr()
    assert status == wanted
    assert words in printed.err
    assert printed.err.startswith("foresay pull: ") and printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "foresay.server.cli", "pull", "Qwen/Qwen3-8B", "--draft"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "cannot be reached" in done.stderr
    assert done.stdout == ""


def test_models_lists_pairs_and_what_is_on_disk(cache, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of-wheels"))
    assert main(["models"]) == 0
    assert "\n  Qwen/Qwen3-8B " in capsys.readouterr().out
    made = snapshot(cache, "config.json", "model.safetensors")
    made.parent.parent.rename(cache / "models--Qwen--Qwen3-8B")
    assert main(["models"]) == 0
    assert "\n* Qwen/Qwen3-8B " in capsys.readouterr().out


def test_models_needs_no_torch():
    code = "import sys; from foresay.server.cli.main import main; main(['models']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
