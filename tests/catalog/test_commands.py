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
from tests.verifier.faked_hub import COMMIT, Hub, snapshot

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
        [sys.executable, "-m", "foresay.server.cli.main", "pull", "Qwen/Qwen3-8B", "--draft"],
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
    directory = cache / "models--Qwen--Qwen3-8B" / "snapshots" / COMMIT
    made = snapshot(cache, "config.json", "model.safetensors")
    made.parent.parent.rename(cache / "models--Qwen--Qwen3-8B")
    assert main(["models"]) == 0
    assert "\n* Qwen/Qwen3-8B " in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    found = {one["id"]: one for one in json.loads(capsys.readouterr().out)}
    assert directory.is_dir()
    assert [id for id, one in found.items() if one["on_disk"]] == ["Qwen/Qwen3-8B"]
    assert found["Qwen/Qwen3-8B"]["drafts"][1]["setting"] == "eagle3:AngelSlim/Qwen3-8B_eagle3"


def test_models_needs_no_torch():
    code = "import sys; from foresay.server.cli.main import main; main(['models']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
