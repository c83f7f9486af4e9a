"""The folder of an unfinished run: whose it is, and how one that cannot be continued is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foresay.drafters.training import files
from foresay.drafters.training.files import DiskError
from foresay.drafters.training.run_folder import RunFolder
from foresay.drafters.training.settings import Settings
from foresay.spec.errors import ConfigurationError

SETTINGS = Settings("eagle3", "bundled", "p.txt", 40, 24, 12, 4, 5e-3, 3, 0)


def unfinished(out: Path) -> RunFolder:
    """A run that has written its first texts, and is over."""
    work = RunFolder(out, SETTINGS)
    files.save(work.text(0), [torch.tensor([1, 2])])
    work.close()
    return work


def test_the_same_run_goes_on(tmp_path) -> None:
    work = unfinished(tmp_path / "head")
    again = RunFolder(tmp_path / "head", SETTINGS)
    assert again.text(0).exists()
    again.remove()
    assert not work.path.exists()


def test_another_run_does_not_go_on_with_it(tmp_path) -> None:
    unfinished(tmp_path / "head")
    with pytest.raises(ConfigurationError, match=r"head\.work: belongs to a run with steps 12 instead of 13"):
        RunFolder(tmp_path / "head", replace(SETTINGS, steps=13))


def test_another_run_takes_a_folder_in_which_nothing_was_made(tmp_path) -> None:
    RunFolder(tmp_path / "head", SETTINGS)
    other = RunFolder(tmp_path / "head", replace(SETTINGS, steps=13))
    assert json.loads((other.path / "settings.json").read_text())["steps"] == 13
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_removed_run_left_does_not_count(tmp_path) -> None:
    work = unfinished(tmp_path / "head")
    (work.path / "settings.json").unlink()
    assert not RunFolder(tmp_path / "head", replace(SETTINGS, seed=1)).text(0).exists()


@pytest.mark.parametrize("change", [{"format": 1}, {"format": None}, {"temperatures": None}, {"colour": "red"}])
def test_the_work_of_another_version_is_refused(tmp_path, change) -> None:
    path = unfinished(tmp_path / "head").path / "settings.json"
    held = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None or key == "layers"}))
    with pytest.raises(ConfigurationError, match=r"head\.work: holds a run of another version of Foresay"):
        RunFolder(tmp_path / "head", SETTINGS)


@pytest.mark.parametrize("content", ["", '{"format": 2', "[]", "\0"])
def test_damaged_settings(tmp_path, content) -> None:
    (unfinished(tmp_path / "head").path / "settings.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"settings\.json: is damaged; remove .*head\.work to start again$"):
        RunFolder(tmp_path / "head", SETTINGS)


def test_folders_where_no_model_can_be(tmp_path) -> None:
    def refused(out: Path, message: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigurationError, match=message) as caught:
            RunFolder(out, SETTINGS)
        assert str(caught.value).startswith(f"--out {out}: ")
        assert sorted(tmp_path.rglob("*")) == before

    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file; name a folder that is not there yet")
    refused(tmp_path / "file" / "head", r"cannot be made \(Not a directory\)")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    refused(tmp_path / "full", "is not empty; name another folder")
    (tmp_path / "full" / "config.json").write_text("{}")
    refused(tmp_path / "full", "holds a model already; name another folder")
    (tmp_path / "head.work").write_text("x")
    refused(tmp_path / "head", r"head\.work cannot be made \(File exists\)")
    refused(Path("/"), "name a folder of its own")


def test_an_empty_folder_will_do(tmp_path) -> None:
    (tmp_path / "head").mkdir()
    assert RunFolder(tmp_path / "head", SETTINGS).path == tmp_path / "head.work"


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"PK\3\4", None])
def test_a_damaged_file_is_named(tmp_path, damage) -> None:
    path = tmp_path / "state.pt"
    files.save(path, {"step": 1, "model": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-900] if damage is None else damage)
    with pytest.raises(DiskError, match=r"state\.pt: is damaged or cannot be read; remove it") as caught:
        files.load(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_cannot_be_published_whole_is_not_published_at_all(tmp_path) -> None:
    def broken(partial: Path) -> None:
        partial.write_bytes(b"half")
        raise RuntimeError("unexpected pos 4 vs 8\nat 3")

    parts = {"model.safetensors": files.weights({"a": torch.ones(2)}, torch.float32), "config.json": broken}
    with pytest.raises(DiskError, match=r"config\.json: cannot be written \(unexpected pos 4 vs 8\)"):
        files.publish(tmp_path / "head", parts)
    assert not (tmp_path / "head").exists()
