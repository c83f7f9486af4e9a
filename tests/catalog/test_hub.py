"""Names of models: directories, cached hub repositories without a network, and every way of not finding one."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from foresay.server.catalog.hub import PATTERNS, cached, resolve
from foresay.verifier.heads.layouts import PATTERNS as HEAD_PATTERNS
from foresay.verifier.model.errors import NoSuchModel
from tests.verifier.faked_hub import COMMIT, Hub, snapshot


def refused(name, *words):
    with pytest.raises(NoSuchModel) as caught:
        resolve(name)
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
    refused(tmp_path / "model", "is a file, but no GGUF file; of a safetensors checkpoint, name the directory")


def test_safetensors_go_before_a_file_of_llama_cpp(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(tmp_path) == tmp_path


@pytest.fixture
def unpacked(monkeypatch):
    """Files of llama.cpp that the hub gave, instead of directories made of them: these are empty."""
    monkeypatch.setattr("foresay.server.catalog.hub._unpacked", lambda file: file)


SPLIT = [f"big/m-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
QUANTISED = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-F16.gguf"]


def test_a_cached_repository_of_llama_cpp_needs_no_network(cache, unpacked):
    directory = snapshot(cache, *QUANTISED)
    assert resolve("owner/model:Q4_K_M") == directory / "m-Q4_K_M.gguf" == cached("owner/model:q4_k_m")
    assert resolve("owner/model:m-Q4_K_S.gguf") == directory / "m-Q4_K_S.gguf"
    refused("owner/model:Q4_K", "has no GGUF file called Q4_K (m-Q4_K_M.gguf, m-Q4_K_S.gguf): name one after a colon")
    directory = in_gguf(directory)
    assert resolve("owner/model-GGUF") == directory / "m-Q4_K_M.gguf" == cached("owner/model-GGUF")
    (directory / "m-Q4_K_M.gguf").rename(directory / "m-Q5_K_M.gguf")
    refused("owner/model-GGUF", "has several GGUF files (m-Q4_K_S.gguf, m-Q5_K_M.gguf): name one after a colon")
    assert cached("owner/model-GGUF") is None


def in_gguf(directory: Path) -> Path:
    """The snapshot, of a repository whose name says what is in it."""
    moved = directory.parents[1].rename(directory.parents[2] / "models--owner--model-GGUF")
    return moved / "snapshots" / COMMIT


def test_of_several_files_one_is_chosen(hub, unpacked, monkeypatch):
    monkeypatch.setattr(Hub, "FILES", {name: name.encode() for name in (*QUANTISED, *SPLIT)})
    assert cached("owner/model-GGUF") is None
    assert resolve("owner/model-GGUF").name == "m-Q4_K_M.gguf"
    monkeypatch.setattr(Hub, "FILES", dict.fromkeys(("m-Q4_K_S.gguf", *SPLIT), b""))
    refused("owner/other-GGUF", f"has several GGUF files ({SPLIT[0]}, m-Q4_K_S.gguf): name one after a colon")
    monkeypatch.setattr(Hub, "FILES", dict.fromkeys(("a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf"), b""))
    refused("owner/two-GGUF", "has several GGUF files (a-Q4_K_M.gguf, b-Q4_K_M.gguf): name one after a colon")
    monkeypatch.setattr(Hub, "FILES", {name: name.encode() for name in SPLIT})
    assert resolve("owner/single-GGUF").name == Path(SPLIT[0]).name


@pytest.mark.parametrize("online", [True, False])
def test_the_file_that_is_here_is_taken_with_and_without_a_network(hub, unpacked, monkeypatch, online):
    """Though the hub has one that would be chosen: one name is one model, and ``cached`` says which."""
    monkeypatch.setattr(Hub, "FILES", {name: name.encode() for name in QUANTISED})
    there = resolve("owner/model-GGUF:Q4_K_S")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not online)
    assert resolve("owner/model-GGUF") == there == cached("owner/model-GGUF")


def test_a_file_of_llama_cpp_is_fetched_with_all_its_parts(hub, unpacked, monkeypatch):
    files = {name: name.encode() for name in ("README.md", *QUANTISED, *SPLIT)}
    monkeypatch.setattr(Hub, "FILES", files)
    assert cached("owner/model:Q8_0") is None
    found = resolve("owner/model:Q8_0")
    there = sorted(each.relative_to(found.parents[1]).as_posix() for each in found.parents[1].rglob("*.gguf"))
    assert there == SPLIT and found.name == Path(SPLIT[0]).name
    assert cached("owner/model:Q8_0") == found
    found.with_name(Path(SPLIT[1]).name).unlink()
    assert cached("owner/model:Q8_0") is None


def test_a_repository_without_the_requested_file(hub):
    refused("owner/model:Q8_0", "owner/model:Q8_0 has no GGUF file")


def test_messages_name_the_flag(tmp_path):
    with pytest.raises(NoSuchModel, match=r"^--draft /no/such: no such file or directory$"):
        resolve("/no/such", flag="--draft")


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model/of/mine", "a/b/c"])
def test_a_path_is_never_looked_up_on_the_hub(name, cache):
    refused(name, "no such file or directory")


@pytest.mark.parametrize("name", ["owner/mo del", "owner/model--x", "bad..name"])
def test_neither_path_nor_repository(name, cache):
    refused(name, "neither a directory nor a hub repository")


def test_a_cached_repository_needs_no_network(cache):
    directory = snapshot(cache, "config.json", "model.safetensors")
    assert resolve("owner/model") == directory


def test_a_cached_repository_without_config(cache):
    snapshot(cache, "model.safetensors")
    refused("owner/model", "no config.json")


def test_offline_and_not_cached(cache):
    refused("owner/model", "owner/model is not a directory", "HF_HUB_OFFLINE is set", str(cache), "download it")


def test_hub_out_of_reach(cache, monkeypatch):
    """A connection that is really refused: nothing listens on the port."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("owner/model", "the hub at http://127.0.0.1:9 cannot be reached (", "check the connection, or download it")


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
        ("owner/broken", ["the hub at http", "answered with an error", "Bad request", "try again"]),
    ],
)
def test_what_the_hub_answers_is_reported_with_what_to_do(hub, name, words):
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


def test_what_is_here_is_known_without_asking(cache, tmp_path):
    assert cached("owner/model") is None
    directory = snapshot(cache, "config.json")
    assert cached("owner/model") is None, "no weights"
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (directory / "model-1.safetensors").write_text("")
    assert cached("owner/model") is None, "one of two: the download broke off"
    (directory / "model-2.safetensors").write_text("")
    assert cached("owner/model") == directory
    assert cached(str(directory)) == directory
    for name in ("", "/no/such", "..", "owner/mo del", "a/b/c", "owner/" + "x" * 500, "\x00"):
        assert cached(name) is None


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "{}"])
def test_a_damaged_index_is_no_model(cache, index):
    directory = snapshot(cache, "config.json")
    (directory / "model.safetensors.index.json").write_text(index)
    assert cached("owner/model") is None
